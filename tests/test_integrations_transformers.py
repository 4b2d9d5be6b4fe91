"""The Trainer's callback: its steps, FLOPs, logs and pauses; and a Trainer that computes what it always did."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("transformers", reason="the Trainer is transformers'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from flopmeter import ConfigError, Run, TrainingMonitor, count_flops, load_run
from flopmeter.goodput import goodput
from flopmeter.integrations.transformers import LOGGED, FlopmeterCallback
from flopmeter.totals import totals

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CONFIG = {"monitoring": {"peak_flop_per_s": 1e12, "sinks": [], "flops_profile_freq": 0}}
LENGTH, VOCABULARY, BATCH = 16, 64, 2


def make_llama(layers: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
    )


def llama_flop(lengths: list[int], layers: int = 1) -> int:
    """Forward and backward by hand: weights are used three times, as is each of the two attention products."""
    hidden, key_value, inner = 32, 16, 48
    per_token = layers * (2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * inner) + hidden * VOCABULARY
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return 3 * (2 * per_token * sum(lengths) + layers * 2 * 2 * hidden * pairs)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of one padded length; `pads` says how much of each is padding."""

    def __init__(self, num: int, pads: Callable[[int], int] | None = None) -> None:
        self.num, self.pads = num, pads

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        sample = {"input_ids": ids, "labels": ids}
        if self.pads is not None:
            sample["attention_mask"] = (torch.arange(LENGTH) < LENGTH - self.pads(index)).long()
        return sample


def make_trainer(
    folder: Path, model: Any = None, data: Any = None, callbacks: Any = None, collator: Any = None, **settings: Any
) -> Trainer:
    settings = {"max_steps": 6, "logging_steps": 2, "report_to": "none", "save_strategy": "no", **settings}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, use_cpu=True, disable_tqdm=True, seed=3, **settings
    )
    given = {
        "train_dataset": data or Tokens(64),
        "eval_dataset": Tokens(4),
        "callbacks": callbacks,
        "data_collator": collator,
    }
    return Trainer(model or make_llama(), args, **given)


def measured(folder: Path, logged: Collection[str] | None = LOGGED, **settings: Any) -> tuple[Trainer, Run]:
    trainer = make_trainer(folder, callbacks=[FlopmeterCallback(config=CONFIG, logged=logged)], **settings)
    trainer.train()
    return trainer, load_run(folder)


class Remembered:
    """The default collator, which keeps the batches that it made, in order."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        self.batches.append(default_data_collator(samples))
        return self.batches[-1]


def tokens_per_step(run: Run) -> list[int]:
    rates, times = run.column("perf/tokens_per_second"), run.column("perf/step_time")
    return [round(rate * time) for rate, time in zip(rates, times, strict=True)]


def test_a_callback_that_has_measured_can_be_copied_and_sent(tmp_path: Path) -> None:
    callback = FlopmeterCallback(tmp_path, CONFIG)
    make_trainer(tmp_path, callbacks=[callback]).train()
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert twin.monitor is None
        make_trainer(tmp_path, callbacks=[twin]).train()
    assert [len(load_run(path)) for path in (tmp_path, *tmp_path.glob("run.2*.jsonl"))] == [6, 6, 6]


def test_every_optimizer_step_is_a_step_with_the_flop_and_tokens_of_its_micro_batches(tmp_path: Path) -> None:
    _, run = measured(tmp_path, gradient_accumulation_steps=3)
    assert list(run.step) == [1, 2, 3, 4, 5, 6]
    assert set(run.column("perf/model_flop")) == {llama_flop([LENGTH] * BATCH * 3)}
    assert set(tokens_per_step(run)) == {LENGTH * BATCH * 3}
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        assert all(0 < share < 1 for share in run.column(f"perf/{phase}_share"))


class DataParallel(torch.nn.DataParallel):
    """What the Trainer wraps its model in where it sees two GPUs; here the model runs on a thread of its own."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.device_ids = [0, 1]

    def forward(self, **inputs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: self.module(**inputs)).result()


def test_a_model_that_the_trainer_spreads_over_several_gpus_is_measured_as_a_whole(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[FlopmeterCallback(config=CONFIG)])
    trainer._wrap_model = lambda model, **_: DataParallel(model)
    trainer.train()
    run = load_run(tmp_path)
    assert set(run.column("perf/model_flop")) == {llama_flop([LENGTH] * BATCH)}
    assert [event["model_flop"] for event in run.events if event["event"] == "count"] == [llama_flop([LENGTH] * BATCH)]


def test_a_last_step_with_fewer_micro_batches_has_fewer_flop(tmp_path: Path) -> None:
    # Ten samples are five batches: two steps of two and one of one.
    _, run = measured(tmp_path, data=Tokens(10), gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2)
    whole, rest = llama_flop([LENGTH] * BATCH * 2), llama_flop([LENGTH] * BATCH)
    assert list(run.column("perf/model_flop")) == [whole, whole, rest] * 2


def test_padding_is_no_work(tmp_path: Path) -> None:
    collator = Remembered()
    _, run = measured(tmp_path, data=Tokens(64, pads=lambda index: index % 5), collator=collator)
    lengths = [batch["attention_mask"].sum(1).tolist() for batch in collator.batches[: len(run)]]
    assert len({sum(row) for row in lengths}) > 1
    assert tokens_per_step(run) == [sum(row) for row in lengths]
    assert list(run.column("perf/model_flop")) == pytest.approx([llama_flop(row) for row in lengths])
    assert all(run.column("perf/mfu_processed")[i] >= run.column("perf/mfu")[i] for i in range(len(run)))


def test_packed_documents_do_not_attend_to_each_other(tmp_path: Path) -> None:
    from transformers import DataCollatorWithFlattening

    flatten, lengths = DataCollatorWithFlattening(), []

    def pack(samples: list[Any]) -> Any:
        lengths.append([len(sample["input_ids"]) for sample in samples])
        return flatten(samples)

    documents = [{"input_ids": list(range(2, 2 + n)), "labels": list(range(2, 2 + n))} for n in (5, 9, 12, 6) * 8]
    _, run = measured(tmp_path, data=documents, collator=pack)
    assert list(run.column("perf/model_flop")) == pytest.approx([llama_flop(row) for row in lengths[: len(run)]])
    assert tokens_per_step(run) == [sum(row) for row in lengths[: len(run)]]


def test_perf_metrics_reach_the_trainers_logs_and_its_reporters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the event file is TensorBoard's")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer, _ = measured(tmp_path, report_to="tensorboard")
    history = [entry for entry in trainer.state.log_history if "perf/mfu" in entry]
    assert history
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    shown = events.Scalars("train/perf/mfu")
    assert [scalar.step for scalar in shown] == [entry["step"] for entry in history]
    assert [scalar.value for scalar in shown] == pytest.approx([entry["perf/mfu"] for entry in history], rel=1e-6)
    # The last log holds what no earlier one did, so nothing that was measured is missing from the charts.
    assert history[-1]["step"] == 6


def test_perf_metrics_reach_an_offline_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="the run is W&B's")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    import_module("wandb_service").forget_service()
    try:
        trainer, _ = measured(tmp_path, report_to="wandb")
        summary = dict(wandb.run.summary)
    finally:
        wandb.finish()
    mfu = [entry["perf/mfu"] for entry in trainer.state.log_history if "perf/mfu" in entry]
    assert summary["train/perf/mfu"] == pytest.approx(mfu[-1])


@pytest.mark.parametrize("logged", [LOGGED, ("perf/hfu",)])
def test_few_keys_join_the_trainers_logs_and_the_user_may_name_others(tmp_path: Path, logged: Collection[str]) -> None:
    trainer, run = measured(tmp_path, logged=logged)
    found = {key for entry in trainer.state.log_history for key in entry if key.startswith("perf/")}
    assert found == set(logged)
    assert {"perf/hfu", "perf/step_time"} <= run.columns.keys()


def test_a_logged_value_covers_the_steps_since_the_last_log(tmp_path: Path) -> None:
    trainer, run = measured(tmp_path, logged=None, max_steps=12)
    logged = [entry for entry in trainer.state.log_history if "perf/steps_per_second" in entry]
    num_steps = [entry["perf/samples_per_second"] / BATCH * entry["perf/step_time"] for entry in logged]
    assert num_steps == pytest.approx([1.0] * len(logged))  # a mean of steps, each of one batch
    unmarked = [run.column("perf/step_time")[i] for i in run.steady()]
    assert min(unmarked) <= min(entry["perf/step_time"] for entry in logged)
    assert max(entry["perf/step_time"] for entry in logged) <= max(unmarked)


def test_evaluation_and_saving_are_pauses_and_no_steps(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
    _, run = measured(tmp_path, **settings)
    assert list(run.step) == [1, 2, 3, 4, 5, 6]
    pauses = [
        (event["name"], event["after_step"])
        for event in run.events
        if event["event"] == "pause" and event["name"] != "flopmeter"
    ]
    assert pauses == [("eval", 2), ("eval", 4), ("checkpoint", 4), ("eval", 6), ("checkpoint", 6)]
    assert all(event["duration_s"] > 0 for event in run.events if event["event"] == "pause")
    assert [event["step"] for event in run.events if event["event"] == "evaluation"] == [2, 4, 6]


def test_evaluating_on_the_training_data_is_not_waiting_for_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[FlopmeterCallback(config=CONFIG)], eval_strategy="steps", eval_steps=1)
    trainer.eval_dataset = trainer.train_dataset
    trainer.train()
    pauses = [
        event["name"]
        for event in load_run(tmp_path).events
        if event["event"] == "pause" and event["name"] != "flopmeter"
    ]
    assert pauses == ["eval"] * 6


def test_saving_the_best_and_evaluating_at_the_start_are_pauses(tmp_path: Path) -> None:
    settings = {"eval_on_start": True, "metric_for_best_model": "loss", "save_strategy": "best"}
    _, run = measured(tmp_path, eval_strategy="steps", eval_steps=3, **settings)
    pauses = [
        (event["name"], event["after_step"])
        for event in run.events
        if event["event"] == "pause" and event["name"] != "flopmeter"
    ]
    assert pauses == [("eval", 0), ("eval", 3), ("eval", 6)]
    assert len(run) == 6


def test_a_resumed_run_is_appended_under_the_trainers_step_numbers(tmp_path: Path) -> None:
    measured(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    callback = FlopmeterCallback(config=CONFIG)
    make_trainer(tmp_path, callbacks=[callback], max_steps=7).train(resume_from_checkpoint=True)
    run = load_run(tmp_path)
    assert list(run.step) == [1, 2, 3, 4, 5, 6, 7]
    assert set(run.column("perf/model_flop")) == {llama_flop([LENGTH] * BATCH)}


def test_loss_gradient_norm_and_rate_of_a_logged_step_are_in_the_record(tmp_path: Path) -> None:
    trainer, run = measured(tmp_path)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [run.column("training/loss")[entry["step"] - 1] for entry in logged] == [entry["loss"] for entry in logged]
    assert run.column("training/grad_norm")[5] == logged[-1]["grad_norm"]
    assert run.column("training/lr")[5] == logged[-1]["learning_rate"]
    assert math.isnan(run.column("training/loss")[0])  # the Trainer did not tell


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulating"])
def test_the_loss_is_the_same_with_and_without_the_callback(tmp_path: Path, settings: dict[str, Any]) -> None:
    losses = []
    for name, callbacks in (("with", [FlopmeterCallback(config=CONFIG)]), ("without", None)):
        model = make_llama()
        model.config.attention_dropout = 0.1
        out = make_trainer(tmp_path / name, model, callbacks=callbacks, **settings).train()
        losses.append(out.training_loss)
    assert losses[0] == losses[1]


def test_the_callback_agrees_with_a_loop_instrumented_by_hand(tmp_path: Path) -> None:
    collator = Remembered()
    _, run = measured(tmp_path / "trainer", data=Tokens(64, pads=lambda index: index % 3), collator=collator)
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainingMonitor(tmp_path / "loop", CONFIG, model=model, optimizer=optimizer) as monitor:
        for step, batch in enumerate(collator.batches[: len(run)], start=1):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log_step(step, loss=loss)
    loop = load_run(tmp_path / "loop")
    assert list(loop.column("perf/model_flop")) == pytest.approx(list(run.column("perf/model_flop")))


def test_a_compiled_model_counts_as_the_uncompiled_one(tmp_path: Path) -> None:
    torch._dynamo.reset()
    _, run = measured(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    torch._dynamo.reset()
    assert len(run) == 6
    assert run.column("perf/model_flop")[-1] == llama_flop([LENGTH] * BATCH)
    assert all(share > 0 for share in run.column("perf/forward_share"))


def test_recomputation_counts_for_hfu_and_not_for_mfu(tmp_path: Path) -> None:
    _, run = measured(tmp_path, gradient_checkpointing=True)
    assert run.column("perf/model_flop")[-1] == llama_flop([LENGTH] * BATCH)
    assert run.column("perf/hfu")[-1] > 1.05 * run.column("perf/mfu")[-1]


def test_lora_through_peft_needs_no_gradients_of_frozen_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA is peft's")
    model = peft.get_peft_model(make_llama(layers=2), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    batch = {"input_ids": torch.ones(BATCH, LENGTH, dtype=torch.long)}
    expected = count_flops(model, {**batch, "labels": batch["input_ids"]}).model_flop
    assert expected < 0.8 * llama_flop([LENGTH] * BATCH, layers=2)
    _, run = measured(tmp_path, model=model)
    assert run.column("perf/model_flop")[-1] == expected


def test_an_encoder_attends_both_ways(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=VOCABULARY))
    _, run = measured(tmp_path, model=model, data=Tokens(64, pads=lambda _: 4))
    lengths, hidden, inner = [LENGTH - 4] * BATCH, 32, 48
    per_token = 4 * hidden * hidden + 2 * hidden * inner + hidden * hidden + hidden * VOCABULARY
    by_hand = 3 * (2 * per_token * sum(lengths) + 2 * 2 * hidden * sum(n * n for n in lengths))
    assert run.column("perf/model_flop")[-1] == by_hand


def test_a_callback_can_be_added_later_and_trains_twice(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(FlopmeterCallback(config=CONFIG))
    trainer.train()
    first = len(trainer.callback_handler.callbacks)
    trainer.train()
    assert len(trainer.callback_handler.callbacks) == first
    assert "perf/mfu" in trainer.state.log_history[-1]
    (first_run,) = tmp_path.glob("run.*-*.jsonl")  # it had ended: the second training is a run of its own
    assert [list(load_run(run).step) for run in (first_run, tmp_path)] == [[1, 2, 3, 4, 5, 6]] * 2


def test_a_wrong_setting_is_refused_when_the_callback_is_made() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        FlopmeterCallback(config={"monitoring": {"mfu_calculation_mod": "smart"}})


def test_a_failing_monitor_leaves_the_trainer_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(FlopmeterCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            assert self.monitor is not None
            self.monitor.phase = None  # type: ignore[method-assign, assignment]

    trainer = make_trainer(tmp_path, callbacks=[Breaks(config=CONFIG)])
    with caplog.at_level(logging.WARNING, "flopmeter"):
        assert trainer.train().global_step == 6
    assert [record.message for record in caplog.records if "monitoring is now off" in record.message] == [
        "on_pre_optimizer_step failed (TypeError: 'NoneType' object is not callable); "
        "training goes on, monitoring is now off"
    ]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY - 2)}
    words |= {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


TRL_SETTINGS: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": BATCH, "use_cpu": True, "disable_tqdm": True, "report_to": "none",
    "logging_steps": 2, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip


def test_trl_fine_tuning_on_packed_documents(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="the trainer is TRL's")
    datasets = pytest.importorskip("datasets", reason="TRL takes datasets")

    documents = [{"input_ids": list(range(2, 2 + 5 + i % 7))} for i in range(64)]
    args = trl.SFTConfig(str(tmp_path), max_length=LENGTH, packing=True, **TRL_SETTINGS)
    trainer = trl.SFTTrainer(
        make_llama(),
        args,
        train_dataset=datasets.Dataset.from_list(documents),
        processing_class=make_tokenizer(),
        callbacks=[FlopmeterCallback(config=CONFIG)],
    )
    lengths, collate = [], trainer.data_collator

    def remember(samples: list[Any]) -> Any:
        lengths.append([length for sample in samples for length in sample["seq_lengths"]])
        return collate(samples)

    trainer.data_collator = remember
    trainer.train()
    run = load_run(tmp_path)
    assert list(run.step) == [1, 2, 3, 4, 5, 6]
    assert tokens_per_step(run) == [sum(row) for row in lengths[:6]]
    # The fourth step was observed. TRL computes the head in its loss, outside of every module.
    count = next(event for event in run.events if event["event"] == "count")
    head = 3 * 2 * 32 * VOCABULARY * sum(lengths[3])
    assert count["model_flop"] - count["by_module"][""] == pytest.approx(llama_flop(lengths[3]) - head)
    # Every weight is trained, so each product has two gradients: what the loss makes again is not among them.
    assert count["backward_flop"] == pytest.approx(2 * count["forward_flop"])
    assert count["recompute_flop"] > 0
    assert "perf/mfu" in trainer.state.log_history[-1]


def test_the_reference_pass_of_preference_tuning_is_no_pause(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="the trainer is TRL's")
    datasets = pytest.importorskip("datasets", reason="TRL takes datasets")
    peft = pytest.importorskip("peft", reason="without an adapter the reference is another model")

    pairs = [{"prompt": f"w{i} w2", "chosen": " w3 w4", "rejected": " w5"} for i in range(32)]
    trainer = trl.DPOTrainer(
        make_llama(),
        args=trl.DPOConfig(str(tmp_path), **TRL_SETTINGS),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=make_tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[FlopmeterCallback(config=CONFIG)],
    )
    trainer.train()
    run = load_run(tmp_path)
    assert len(run) == 6
    assert [event for event in run.events if event["event"] == "pause" and event["name"] != "flopmeter"] == []


def test_what_grpo_does_besides_training_is_told_by_role_and_adds_up(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="the trainer is TRL's")
    datasets = pytest.importorskip("datasets", reason="TRL takes datasets")

    make_llama().save_pretrained(tmp_path / "model")  # TRL makes the reference from the same files
    trainer = trl.GRPOTrainer(
        str(tmp_path / "model"),
        reward_funcs=lambda completions, **_: [float(len(text) % 5) for text in completions],
        args=trl.GRPOConfig(
            str(tmp_path), num_generations=2, max_completion_length=8, beta=0.1, **{**TRL_SETTINGS, "max_steps": 12}
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{i} w2 w3 w4"} for i in range(32)]),
        processing_class=make_tokenizer(),
        callbacks=[FlopmeterCallback(config=CONFIG)],
    )
    lengths: list[list[int]] = []

    def remember(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            lengths.append(inputs["attention_mask"].sum(1).tolist())

    trainer.model.register_forward_pre_hook(remember, with_kwargs=True)
    trainer.train()
    run = load_run(tmp_path)
    assert list(run.step) == list(range(1, 13))
    assert tokens_per_step(run) == [sum(row) for row in lengths]
    # The head is asked for all tokens but the last place of a row; TRL computes it in its loss.
    count = run.last("count")
    told = lengths[int(count["after_step"]) - 1]
    cut = sum(length == max(told) for length in told)
    assert count["model_flop"] == pytest.approx(llama_flop(told) - 3 * 2 * 32 * VOCABULARY * cut)
    assert count["by_role"].keys() >= {"generation", "reference"}

    spent, sums = goodput(run), totals(run)
    assert {role.name for role in sums.roles} == {"training", "generation", "reference", "reward", "log_probs"}
    assert all(role.seconds > 0 for role in sums.roles)
    named = sum(role.seconds for role in sums.roles) + spent.pause_s.get("flopmeter", 0.0)
    named += spent.measuring_s + spent.start_up_s
    # What is left is the loop's way from one step to the next; a time that is counted twice would make it negative.
    assert -0.02 * spent.wall_s < spent.wall_s - named < 0.25 * spent.wall_s
