"""Examples to start from; each is a folder with a `config.yaml` and a module that uses the public interface."""
