"""A run as an Indexed Job of Kubernetes, or as a TrainJob of Kubeflow Trainer.

Owns the values that such a job is written with, their checks, its manifest, and the calls of kubectl. How the pods of a
job find each other is in `launch/kubernetes.py`.
"""
