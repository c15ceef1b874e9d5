r"""Compare faster solvers of the adapter with the paper's fifty Adam steps, in ten task orders of a
CLIP benchmark.

    OMP_WAIT_POLICY=passive python benchmarks/closed_form.py --models MODELS --data MINI8_DATA --out
    OUT

``MODELS`` holds ``clip/`` (a CLIPModel), ``clip.json`` (prompt templates and class names of the
tasks, in their order) and a fine-tuned CLIPVisionModel per task; ``MINI8_DATA`` a ``<task>.npz``
per task. Every solver gets the filtered task vector and both subspaces of a layer, and returns the
update U that is added to tau P. The results are written to ``OUT/closed_form.md`` and ``.json``.
``docs/notes/closed_form.md`` has the derivation and the conclusion.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPTokenizer, CLIPVisionModel

from fusion_bench_nufilt.core import FusionConfig
from fusion_bench_nufilt.core.adapter import Objective, fit_adapter
from fusion_bench_nufilt.core.fusion import _initial_A
from fusion_bench_nufilt.core.subspace import null_space_filter, top_right_singular_vectors
from fusion_bench_nufilt.layers import select_layers
from fusion_bench_nufilt.stream import AccuracyMatrix, task_order


class Problem(NamedTuple):
    """One layer of one merging step."""

    tau: Tensor  # (d_o, d_i)
    tau_filtered: Tensor  # tau P
    tau_merged: Tensor
    V_t: Tensor  # (d_i, r_v)
    V_p: Tensor  # (d_i, r_p)
    A: Tensor  # (r_l, d_i)
    # (d_i, min(d_o, d_i)), all right singular vectors of tau: V_t and the rest, found with it
    E: Tensor

    @property
    def V(self) -> Tensor:
        return torch.cat([self.V_t, self.V_p], dim=-1)

    @property
    def T(self) -> Tensor:
        """The columns of the objective's target that are not zero under the filter, ``(d_o,
        r_v)``.
        """
        return (self.tau - self.tau_filtered - self.tau_merged) @ self.V_t


Solve = Callable[[Problem], Tensor]


def adam(
    steps: int, lr: float, *, rank: float = 1, start: str = "random", inside: bool = False
) -> Solve:
    """The paper's: U = tau B A. ``rank``: share of r_l; ``start="V_t"``: the initial A is a
    multiple of V_t^T; ``inside``: drop from U what the objective does not see."""

    def solve(p: Problem) -> Tensor:
        A = p.V_t.mT * p.A.norm(dim=-1).mean() if start == "V_t" else p.A[: round(rank * len(p.A))]
        tau = p.tau[None]
        tau_filtered = tau if p.tau_filtered is p.tau else p.tau_filtered[None]
        objective = Objective.build(tau, tau_filtered, p.tau_merged[None], p.V_t[None], p.V_p[None])
        A, B, _ = fit_adapter(objective, A[None], lr=lr, max_steps=steps)
        U = (p.tau @ B[0]) @ A[0]
        return U @ span_projector(p.V) if inside else U

    return solve


def update_ridge(ridge: float, *, in_tau: bool = False, restore_only: bool = False) -> Solve:
    r"""min_U ||T - U V||^2 + ridge ||U||^2 = T (V^T V + ridge I)^-1 V^T; the mean eigenvalue of V^T
    V is 1.

    ``in_tau``: over the U = tau X; ``restore_only``: without the part of T that undoes earlier
    tasks.
    """

    def solve(p: Problem) -> Tensor:
        V, T = p.V, (p.tau - p.tau_filtered) @ p.V_t if restore_only else p.T
        if in_tau and len(T) > len(V):  # else tau reaches everything
            T = p.tau @ torch.linalg.lstsq(p.tau, T, driver="gelsy").solution
        K = V.mT @ V
        K.diagonal().add_(ridge)
        return T @ (V @ torch.linalg.solve(K, torch.eye(len(K), T.shape[-1]))).mT

    return solve


def adapter_ridge(
    ridge: float, *, rank: float = math.inf, sketch: bool = False, restore_only: bool = False
) -> Solve:
    r"""min_A ||T - tau B A V||^2 + lambda ||A||^2 with B fixed to the top right singular vectors of
    tau, ``rank`` times r_l of them; where B has all, BA is any matrix. The columns of tau B are
    orthogonal: with g their squared norms and V^T V = W s W^T, A = [(B^T tau^T T W) / (g s^T +
        lambda)] W^T V^T. ridge is lambda over the mean g.

    ``sketch``: B spans tau^T tau A^T instead, with the initial A of the adapter, so that no more
    singular vectors of tau are needed than V_t."""

    def solve(p: Problem) -> Tensor:
        V, T = p.V, (p.tau - p.tau_filtered) @ p.V_t if restore_only else p.T
        B = sketched(p) if sketch else p.E[:, : round(min(rank * len(p.A), p.E.shape[-1]))]
        tau_B = p.tau @ B
        g, scale = tau_B.square().sum(dim=0), p.tau.square().sum() / min(p.tau.shape)
        s, W = torch.linalg.eigh(V.mT @ V)
        C = (tau_B.mT @ T @ W[: T.shape[-1]]) / (g[:, None] * s + ridge * scale)
        return tau_B @ (C @ (V @ W).mT)

    return solve


def sketched(p: Problem) -> Tensor:
    """An orthonormal basis of the rows of A tau^T tau in which tau^T tau is diagonal, ``(d_i,
    r_l)``.
    """
    G = p.tau.mT @ p.tau
    Q = torch.linalg.qr(G @ p.A.mT).Q
    return Q @ torch.linalg.eigh(Q.mT @ G @ Q).eigenvectors


PAPER, UNFILTERED = "Adam 50 x 1e-3 (paper)", "adapter only (P = I)"
PAIRS = ((1, 5e-2), (2, 2.5e-2), (5, 1e-2), (10, 5e-3), (25, 2e-3), (100, 1e-3), (200, 1e-3))
WAYS: dict[str, Solve] = {
    PAPER: adam(50, 1e-3),
    "filter only": lambda p: torch.zeros_like(p.tau),
    UNFILTERED: adam(50, 1e-3),
    **{f"Adam {steps} x {lr:g}": adam(steps, lr) for steps, lr in PAIRS},
    "Adam 50 x 1e-3, r_l / 2": adam(50, 1e-3, rank=1 / 2),
    "Adam 50 x 1e-3, r_l / 4": adam(50, 1e-3, rank=1 / 4),
    "Adam 50 x 1e-3, A starts at V_t": adam(50, 1e-3, start="V_t"),
    **{f"update ridge {ridge:g}": update_ridge(ridge) for ridge in (0.01, 0.1, 0.3, 1, 3, 10)},
    **{
        f"adapter ridge {ridge:g}": adapter_ridge(ridge) for ridge in (0.01, 0.1, 1, 3, 10, 30, 100)
    },
    **{
        f"adapter ridge {ridge:g}, rank r_l": adapter_ridge(ridge, rank=1)
        for ridge in (1, 3, 10, 30)
    },
    **{
        f"adapter ridge {ridge:g}, sketched": adapter_ridge(ridge, sketch=True)
        for ridge in (3, 10, 30)
    },
    **{f"adapter ridge 10, rank {n} r_l": adapter_ridge(10, rank=n) for n in (0.8, 3)},
    # These are not candidates; they show what the candidates' parts do.
    "why: Adam 50 x 1e-3, U kept in span V": adam(50, 1e-3, inside=True),
    "why: Adam 200 x 0.01": adam(200, 1e-2),
    "why: update ridge 1, U = tau X": update_ridge(1, in_tau=True),
    "why: update ridge 1, restoring only": update_ridge(1, restore_only=True),
    "why: adapter ridge 10, restoring only": adapter_ridge(10, restore_only=True),
}


def span_projector(V: Tensor) -> Tensor:
    return V @ torch.linalg.pinv(V, rtol=1e-5)


def norm2(x: Tensor) -> float:
    return float(x.square().sum())


def measure(p: Problem, U: Tensor) -> dict[str, float]:
    """Describe an update by numbers that are comparable across layers."""
    T, lost, through = (
        p.T,
        p.tau - p.tau_filtered,
        p.tau_filtered @ p.V_p,
    )  # the last is zero under the filter
    return {
        "loss": (norm2(T - U @ p.V_t) + norm2(through + U @ p.V_p))
        / (norm2(T) + norm2(through)),  # 1 where U = 0
        "norm": (norm2(U) / norm2(p.tau)) ** 0.5,
        "restored": float((U * lost).sum())
        / max(norm2(lost), 1e-30),  # of what the filter took: 1 is all of it
        "erased": -float((U * p.tau_merged).sum())
        / norm2(p.tau_merged),  # of what was merged before
        "top": norm2(torch.linalg.qr(p.tau @ p.V_t).Q.mT @ U)
        / max(norm2(U), 1e-30),  # share in tau's top left directions
        "unseen": norm2(U - U @ span_projector(p.V))
        / max(norm2(U), 1e-30),  # share the objective does not see
    }


class Bench:
    """The models as layers and the pictures as pixels, each read once."""

    def __init__(self, models: Path, data: Path) -> None:
        recipe = json.loads((models / "clip.json").read_text())
        looks = json.loads((models / "clip" / "preprocessor_config.json").read_text())
        pixel_mean, pixel_std = (
            torch.tensor(looks[key]).view(1, 3, 1, 1) for key in ("image_mean", "image_std")
        )
        clip = CLIPModel.from_pretrained(models / "clip").eval()
        tokenizer = CLIPTokenizer.from_pretrained(models / "clip")
        self.projection = clip.visual_projection
        self.tower = CLIPVisionModel.from_pretrained(
            models / "clip", attn_implementation="eager"
        ).eval()
        views = select_layers(self.tower).values()
        self.live = {
            view.key: view.read(self.tower) for view in views
        }  # views of its memory, written before scoring
        self.pretrained = {key: weight.clone() for key, weight in self.live.items()}
        self.tasks, self.tuned, self.pictures = list(recipe["classes"]), {}, {}
        for task in self.tasks:
            tower = CLIPVisionModel.from_pretrained(models / task)
            self.tuned[task] = {view.key: view.read(tower) for view in views}
            with np.load(data / f"{task}.npz") as file:
                pixels = torch.from_numpy(file["images_test"]).permute(0, 3, 1, 2) / 255
                labels = torch.from_numpy(file["labels_test"])
            names = [recipe["templates"][task].format(name) for name in recipe["classes"][task]]
            words = clip.text_model(
                **tokenizer(names, padding=True, return_tensors="pt")
            ).pooler_output
            head = normalize(clip.text_projection(words), dim=-1)
            self.pictures[task] = ((pixels - pixel_mean) / pixel_std, labels, head.T)

    def score(self, layers: dict[str, Tensor], tasks: list[str]) -> dict[str, float]:
        """Return the accuracy by task of the pretrained tower with these layers, as fractions."""
        for key, weight in layers.items():
            self.live[key].copy_(weight)
        scores = {}
        for task in tasks:
            pixels, labels, head = self.pictures[task]
            features = torch.cat(
                [self.tower(pixel_values=x).pooler_output for x in pixels.split(50)]
            )
            scores[task] = float(
                ((self.projection(features) @ head).argmax(-1) == labels).float().mean()
            )
        return scores

    def merge(
        self, order: list[str], way: str, config: FusionConfig, seed: int
    ) -> dict[str, float]:
        """Return ACC, BWT, the solver's median seconds per merging step, and the averaged
        measures.
        """
        matrix, seconds, measures = AccuracyMatrix(order), [], []
        merged = self.tuned[order[0]]
        matrix.record(1, self.score(merged, order[:1]))
        for step, task in enumerate(order[1:], 2):
            seconds.append(0.0)
            before, merged = merged, {}
            for name, theta_0 in self.pretrained.items():
                tau, tau_merged = self.tuned[task][name] - theta_0, before[name] - theta_0
                V_p = top_right_singular_vectors(tau_merged, config.null_rank)
                E = top_right_singular_vectors(tau, min(tau.shape))
                tau_filtered = tau if way == UNFILTERED else null_space_filter(tau, V_p)
                A = _initial_A(name, tau.shape[1], config, seed, step)
                problem = Problem(
                    tau, tau_filtered, tau_merged, E[:, : config.task_rank], V_p, A, E
                )
                start = time.perf_counter()
                U = WAYS[way](problem)
                seconds[-1] += time.perf_counter() - start
                merged[name] = before[name] + tau_filtered + U
                measures.append(measure(problem, U))
            matrix.record(step, self.score(merged, order if step == len(order) else [task]))
        result = {
            "ACC": 100 * matrix.acc,
            "BWT": 100 * matrix.bwt,
            "ms per step": 1e3 * median(seconds),
        }
        return result | {key: mean(row[key] for row in measures) for key in measures[0]}


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Return Markdown with a row per solver; the last column is the rule by which one may replace
    the paper's.
    """

    def cell(key: str, values: list[float]) -> str:
        digits = 1 if key.startswith(("ACC", "BWT", "ms")) else 3
        return f"{mean(values):.{digits}f}" + (
            f" ± {stdev(values):.1f}" if key.startswith(("ACC", "BWT")) else ""
        )

    lines = []
    for name, run in runs.items():
        column = {key: [result[key] for result in run] for key in run[0]}
        for key in ("ACC", "BWT"):
            column[f"{key} - paper's"] = [
                r[key] - p[key] for r, p in zip(run, runs[PAPER], strict=True)
            ]
        holds = mean(column["ACC - paper's"]) >= -0.5 and mean(column["BWT - paper's"]) >= 0
        cells = [
            name,
            *(cell(key, values) for key, values in column.items()),
            "holds" if holds else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    head = ["way", *column, "rule"]
    return "\n".join([f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines])


def time_layer(d_o: int, d_i: int) -> str:
    """Return median milliseconds on a random layer with the size and ranks of CLIP ViT-B/32."""
    tau, tau_merged = torch.randn(2, d_o, d_i, generator=torch.Generator().manual_seed(0))
    config, lines = FusionConfig(), []
    E, V_p = (
        top_right_singular_vectors(tau, d_i),
        top_right_singular_vectors(tau_merged, config.null_rank),
    )
    A = _initial_A("layer", d_i, config, 0, 1)
    problem = Problem(
        tau, null_space_filter(tau, V_p), tau_merged, E[:, : config.task_rank], V_p, A, E
    )
    for name in (
        PAPER,
        "Adam 10 x 0.005",
        "Adam 5 x 0.01",
        "update ridge 1",
        "adapter ridge 1",
        "adapter ridge 10, rank r_l",
        "adapter ridge 10, sketched",
    ):
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            WAYS[name](problem)
            seconds.append(time.perf_counter() - start)
        lines.append(f"| {name} | {d_o} x {d_i} | {1e3 * median(seconds):.1f} |")
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("outputs/closed_form"))
    parser.add_argument(
        "--seed", type=int, default=42, help="of the first of the ten orders; the paper's is 42"
    )
    parser.add_argument(
        "--ways", default="", help="regular expression; the paper's is always among them"
    )
    # The paper's 128 and 64 of width 768, at width 128; its 8 of the task subspace are kept.
    parser.add_argument("--null-rank", type=int, default=21)
    parser.add_argument("--lora-rank", type=int, default=10)
    parser.add_argument("--task-rank", type=int, default=8)
    args = parser.parse_args()
    config = FusionConfig(
        null_rank=args.null_rank, lora_rank=args.lora_rank, task_rank=args.task_rank
    )

    torch.set_num_threads(1)
    bench = Bench(args.models, args.data)
    alone = mean(bench.score(bench.tuned[task], [task])[task] for task in bench.tasks)
    zero_shot = mean(bench.score(bench.pretrained, bench.tasks).values())
    runs: dict[str, list] = {
        name: [] for name in WAYS if name == PAPER or re.search(args.ways, name)
    }
    for seed in range(args.seed, args.seed + 10):
        order = task_order(bench.tasks, shuffle=True, seed=seed)
        for name, run in runs.items():
            run.append(bench.merge(order, name, config, seed))
            print(f"{seed} {name}: ACC {run[-1]['ACC']:.1f} BWT {run[-1]['BWT']:.1f}", flush=True)

    text = [
        f"Ranks {args.null_rank}, {args.lora_rank}, {args.task_rank}; ten orders; torch "
        f"{torch.__version__}, 1 thread.",
        f"Pretrained {100 * zero_shot:.1f}; each task's own model, merged layers only, "
        f"{100 * alone:.1f}.\n",
        table(runs),
        "\n| way | one layer | ms |\n| --- | --- | --- |",
        *(time_layer(*shape) for shape in ((768, 768), (3072, 768))),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "closed_form.md").write_text("\n".join(text) + "\n")
    (args.out / "closed_form.json").write_text(json.dumps(runs, indent=1))
    print("\n".join(text))


if __name__ == "__main__":
    main()
