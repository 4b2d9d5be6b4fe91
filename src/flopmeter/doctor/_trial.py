"""What do the checks train? A GPT so small that a step takes milliseconds, on the device at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY, SAMPLES = 2, 64, 2, 32, 256, 4


def device_at_hand() -> torch.device:
    """The accelerator that torch sees, with its number, else the CPU."""
    import torch

    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def matmul_dtype(device: torch.device) -> str:
    """What matmuls are fastest in, of what the device multiplies itself: a T4 or a V100 only emulates bf16."""
    import torch

    if device.type == "cpu":
        return "fp32"
    has_bfloat16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bfloat16 else "fp16"


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Trial:
    """A model in training."""

    def __init__(self, device: torch.device) -> None:
        import torch

        from flopmeter.demo.gpt import GPT, GPTConfig

        torch.manual_seed(0)
        sizes = GPTConfig(num_layers=LAYERS, hidden=HIDDEN, num_heads=HEADS, length=LENGTH, vocabulary=VOCABULARY)
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), device=device)
        self.model = GPT(sizes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    def step(self) -> torch.Tensor:
        """One training step; gives the loss."""
        loss: torch.Tensor = self.model(**self.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
