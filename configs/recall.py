"""Recall over many documents: small models trained from scratch with dense, window, NSA, MoBA and
squid attention.

What: a row holds documents of facts (key, value) between noise, and a tail that asks for some of
  the values. In every method the first of two layers sees the last 8 tokens, enough to bind a value
  to its key; the second is the method. Rows of 80 to 512 tokens in training, of 512 and of four
  times as many in the evaluation.
Command: python -m experiments.recall --config=configs/recall.py --workdir=runs/recall
Hardware: 2 CPU cores. Run time: see docs/results/recall.md.
Expected metric: NSA, MoBA and squid within two points of dense accuracy, window alone near chance.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """arg: "" or "smoke" (two methods, seconds)."""
    if arg not in ("", "smoke"):
        raise ValueError(f"configs/recall.py:{arg}: the argument must be empty or smoke")
    dense = dict(name="dense")
    squid = dict(name="squid")
    local = dict(name="window", window=8)
    window = dict(name="window", window=32)
    nsa = dict(name="nsa", length=8, stride=4, block=16, picks=4, initial=1, local=1, window=32)
    moba = dict(name="moba", block=4, picks=12)
    config = dict(
        seed=0,
        mesh=dict(data=2, tensor=1),
        task=dict(
            documents=30,
            document_tokens=16,
            facts=4,
            asked=10,
            keys=512,
            values=64,
            noise=32,
            longer=4,
        ),
        model=dict(
            embed_dim=64,
            mlp_dim=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            rope_theta=1e6,
            embed_std=0.5,
        ),
        methods=dict(
            dense=dict(attention=(local, dense)),
            window=dict(attention=(local, window)),
            nsa=dict(attention=(local, nsa)),
            moba=dict(attention=(local, moba)),
            squid=dict(attention=(local, squid), apart=True, positions="shared"),
        ),
        stages=(
            dict(documents=3, rows=128, steps=450, span=2048),
            dict(documents=8, rows=64, steps=150, span=2048),
            dict(documents=16, rows=48, steps=150, span=2048),
            dict(documents=30, rows=32, steps=250, span=2048),
        ),
        optimizer=dict(
            learning_rate=3e-3,
            muon_learning_rate=1e-2,
            schedule="cosine",
            warmup_steps=50,
            total_steps=1000,
            b1=0.9,
            b2=0.98,
            eps=1e-8,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        checkpoint_every=100,
        questions=2000,
        evaluation_rows=8,
    )
    if arg == "smoke":
        config["task"] = dict(
            documents=3, document_tokens=16, facts=2, asked=3, keys=32, values=8, noise=8, longer=2
        )
        # rows of one shape, so that one program serves both stages
        config["stages"] = (
            dict(documents=3, rows=4, steps=2, span=0),
            dict(documents=3, rows=4, steps=2, span=128),
        )
        # the two methods that have most code of their own
        config["methods"] = {name: config["methods"][name] for name in ("nsa", "squid")}
        config["optimizer"].update(warmup_steps=1, total_steps=4)
        config["questions"] = 32
    return ml_collections.ConfigDict(config)
