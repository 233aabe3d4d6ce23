import shlex
import sys
from pathlib import Path

import pandas as pd
from paceline import Trainer

from dataset_fn import YourDataset
from model_fn import get_model
from train import train

if sys.argv[1:]:  # such as --epochs 5
    sys.exit(
        f"main.py has no options; change its keywords, or run: paceline train config.yaml {shlex.join(sys.argv[1:])}"
    )

df = pd.read_csv(Path(__file__).with_name("data.csv"))

result = Trainer(
    name="mylab",
    model_fn=get_model,
    dataset_fn=YourDataset,
    df=df,
    train_fn=train,
    batch_size=4,
    lanes=4,
    num_epochs=20,
    procs=2,
).start()
print(f"accuracy: {result.metrics['accuracy']:.3f}")
print(f"run folder: {result.run_dir}")
