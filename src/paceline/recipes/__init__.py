"""Examples to start from: each is a folder with a short module on the public interface and its `config.yaml`."""
