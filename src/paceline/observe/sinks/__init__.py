"""Where events are sent besides the screen: TensorBoard, Weights & Biases, MLflow and sinks of installed packages.

The launcher delivers events to TensorBoard in its own thread. Every other sink runs in a process of its own.
"""
