"""The examples people start from: each a folder with a short module on the public interface and its `config.yaml`."""
