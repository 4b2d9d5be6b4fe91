"""A conv net on pictures like MNIST's, with an evaluation after each epoch: a loop that knows nothing of flopmeter."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS_PER_EPOCH, EPOCHS = 16, 6, 3


def make_data(num: int) -> TensorDataset:
    pictures = torch.rand(num, 1, 28, 28)
    return TensorDataset(pictures, (pictures.mean((1, 2, 3)) * 1000).long() % 10)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 13 * 13, 10, bias=False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = DataLoader(make_data(BATCH * STEPS_PER_EPOCH), BATCH, shuffle=True)
    test = DataLoader(make_data(BATCH * 2), BATCH)
    for _ in range(EPOCHS):
        model.train()
        for pictures, labels in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            num_right = sum(int((model(pictures).argmax(1) == labels).sum()) for pictures, labels in test)
    print(f"final loss {loss.item()!r} right {num_right}")


if __name__ == "__main__":
    main()
