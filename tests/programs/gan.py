"""A GAN with two optimizers that take turns: a loop that knows nothing of flopmeter."""

import torch
from torch import nn
from torch.nn import functional as F

NOISE, HIDDEN, SIZE, BATCH, STEPS = 8, 32, 16, 8, 12


def main() -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.Linear(NOISE, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, SIZE, bias=False), nn.Tanh()
    )
    critic = nn.Sequential(nn.Linear(SIZE, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, 1, bias=False))
    optimize_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    optimize_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    for _ in range(STEPS):
        fake = generator(torch.randn(BATCH, NOISE))
        optimize_critic.zero_grad()
        critic_loss = F.softplus(-critic(torch.rand(BATCH, SIZE))).mean() + F.softplus(critic(fake.detach())).mean()
        critic_loss.backward()
        optimize_critic.step()

        optimize_generator.zero_grad()
        generator_loss = F.softplus(-critic(fake)).mean()
        generator_loss.backward()
        optimize_generator.step()
    print(f"final loss {critic_loss.item()!r} {generator_loss.item()!r}")


if __name__ == "__main__":
    main()
