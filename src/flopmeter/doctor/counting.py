"""Does counting agree with a count by hand, on this device and this torch?"""

from __future__ import annotations

from flopmeter.doctor._result import Result

ORDER = 60
LIMIT_S = 20.0
NEEDS_TORCH = True


def check() -> Result:
    from flopmeter.doctor._trial import Trial, device_at_hand
    from flopmeter.flops.observe import observe
    from flopmeter.flops.side_count import count_flops

    trial = Trial(device_at_hand())
    expected = by_hand()
    ahead = count_flops(trial.model, trial.batch).model_flop
    trial.step()
    with observe(trial.model) as observed:
        trial.step()
    seen = observed.result().model_flop
    figures = {"by_hand_flop": expected, "counted_flop": ahead, "observed_flop": seen}
    if (ahead, seen) == (expected, expected):
        says = f"a small GPT's step: {expected:,.0f} FLOP by hand, by shapes alone, and as observed"
        return Result(standing="works", says=says, figures=figures)
    says = f"a small GPT's step is {expected:,.0f} FLOP by hand, {ahead:,.0f} by shapes and {seen:,.0f} as observed"
    return Result(standing="broken", says=f"{says}: please report it with the version of torch", figures=figures)


def by_hand() -> float:
    """Forward: 2 FLOP per token and weight of the linears, 4 x width per attended pair; backward twice as much.

    Left out, as by convention: norms, GELU, softmax, the loss and the embeddings' look-ups.
    """
    from flopmeter.doctor._trial import HIDDEN, LAYERS, LENGTH, SAMPLES, VOCABULARY

    weights = LAYERS * 12 * HIDDEN**2 + HIDDEN * VOCABULARY  # qkv 3, out 1, MLP 4 + 4; and the head
    pairs = SAMPLES * LENGTH * (LENGTH + 1) / 2  # causal
    return 3 * (2 * SAMPLES * LENGTH * weights + LAYERS * 4 * HIDDEN * pairs)
