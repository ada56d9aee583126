"""Times the GRPO step of TRL on the workload of ``rl_step``, on CPU, for comparison.

TRL brings torch, so it has an environment of its own and this file imports nothing of the project:

    python -m venv peer && peer/bin/pip install --require-hashes -r requirements/locked/peers.txt
    peer/bin/python benchmarks/peer_trl.py --workload=W1 --steps=3 --warmup=1

The model has the sizes of ``benchmarks.model`` and random weights; 8 prompts with 8 completions
each, AdamW with the learning rate 1e-5, no reference model, temperature 1, and the share of even
token ids as reward. Prompts are random words of a vocabulary in which a word is a token. A
completion cannot end early (``min_new_tokens``). The loss is averaged over tokens and clipped as in
``rl_step``. Generation is that of transformers, which has no pages and repeats prompts. The result
is one line of JSON with the names of ``rl_step``; steps are timed from the callback before one to
the callback after it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

# Tokens of a prompt and of a completion, as in rl_step.
WORKLOADS = {"W1": (256, 128), "W2": (1024, 64), "smoke": (64, 64)}
PROMPTS, SAMPLES, VOCABULARY = 8, 8, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=list(WORKLOADS), default="W1")
    parser.add_argument("--steps", type=int, default=3, help="Timed steps.")
    parser.add_argument("--warmup", type=int, default=1, help="Steps before them.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    prompt, completion = WORKLOADS[given.workload]
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer(prompt, completion, given.steps + given.warmup, given.seed, folder, watch).train()
    wall, cpu = (times[given.warmup :] for times in (watch.wall, watch.cpu))
    report = dict(
        peer="trl",
        workload=given.workload,
        s_per_step=round(statistics.median(wall), 3),
        fastest_s=round(min(wall), 3),
        slowest_s=round(max(wall), 3),
        cpu_s_per_step=round(statistics.median(cpu), 3),
        cpu_s=[round(x, 3) for x in cpu],
        steps=given.steps,
        peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        sampled=watch.sampled,
        hardware=f"{torch.get_num_threads()} threads",
    )
    print(json.dumps(report), flush=True)


class Watch(TrainerCallback):
    """Seconds and CPU seconds of every step, and how many tokens the last one sampled."""

    def __init__(self):
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.sampled = 0

    def on_step_begin(self, *args, **named):
        self._begin = time.perf_counter(), time.process_time()

    def on_step_end(self, *args, **named):
        self.wall.append(time.perf_counter() - self._begin[0])
        self.cpu.append(time.process_time() - self._begin[1])


def trainer(
    prompt: int, completion: int, steps: int, seed: int, folder: str, watch: Watch
) -> GRPOTrainer:
    """TRL's trainer for the workload.

    prompt, completion: tokens of each. folder: where TRL may write. watch: is told of every step.
    """

    def even(completion_ids, **named):
        watch.sampled = sum(map(len, completion_ids))
        return [float(np.mean(np.array(ids) % 2 == 0)) for ids in completion_ids]

    rng = np.random.default_rng(seed)
    rows = rng.integers(1, VOCABULARY, (PROMPTS * steps, prompt))
    data = Dataset.from_dict({"prompt": [" ".join(f"t{i}" for i in row) for row in rows]})
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=completion,
        generation_kwargs={"min_new_tokens": completion},
        gradient_checkpointing=False,
        max_steps=steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        temperature=1.0,
        top_k=0,
        bf16=False,
        use_cpu=True,
        seed=seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=model(seed),
        reward_funcs=even,
        args=config,
        train_dataset=data,
        processing_class=words(),
        callbacks=[watch],
    )


def model(seed: int) -> Qwen2ForCausalLM:
    """The architecture of ``benchmarks.model``, with random weights in float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def words() -> PreTrainedTokenizerFast:
    """A tokenizer in which the word t7 is token 7."""
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="t0", pad_token="t0", padding_side="left"
    )


if __name__ == "__main__":
    main()
