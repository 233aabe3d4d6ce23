"""The sinks of events besides the screen: TensorBoard, Weights & Biases, MLflow and sinks of installed packages.

The launcher delivers events to TensorBoard in its own thread. Every other sink runs in a separate process.
"""
