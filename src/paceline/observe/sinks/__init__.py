"""Where events are sent besides the screen: TensorBoard, Weights & Biases, MLflow."""
