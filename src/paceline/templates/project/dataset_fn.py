import torch
from torch.utils.data import Dataset


class YourDataset(Dataset):
    def __init__(self, df):
        self.points = torch.tensor(df[["x", "y"]].to_numpy(), dtype=torch.float32)
        self.labels = torch.tensor(df["label"].to_numpy(), dtype=torch.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]
