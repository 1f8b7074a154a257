"""The fused loss against all logits at once, and against the heads of others: extra memory and processor time.

    python -m benchmarks.loss [--rows 2048] [--hidden 512] [--vocab 151936] [--threads 2] [--rounds 1] [--cases ours naive …]
                              [--device cpu|cuda] [--dtype float32|bfloat16] [--json FILE]

Each case runs in a process of its own: value and gradient of hidden states and weight, once.  `extra_bytes` is the peak
above what inputs and libraries take, gradients included; `cpu_seconds` that of all threads (`gpu_seconds` on CUDA, the best
of three after a warm-up).  `…_8_percent`: 8% of the rows are response tokens.

  floor     three bare matrix products, chunk by chunk     computes no loss
  naive     all logits, log_softmax, autograd              surrogate, entropy of every token
  ours      fused_linear_grpo_loss                         surrogate, entropy of every token
  …_entropy the same with an entropy bonus, so that entropy has a gradient
  liger     Liger's chunked GRPO loss                      surrogate, no entropy
  trl       TRL's ChunkedLogProbFunction                   surrogate outside, entropy of every token
  cce       Apple's cut cross-entropy (torch_compile)      −log p only
The others' packages are installed into `.peers/` at the first run; `--cases` leaves them out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._table import report, row

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".peers"
PEER_PACKAGES = {"liger": "liger-kernel==0.8.5", "trl": "trl==1.16.0", "cce": "cut-cross-entropy==25.1.1"}
CASES = ["floor", "naive", "ours", "naive_entropy", "ours_entropy", "naive_8_percent", "ours_8_percent", *PEER_PACKAGES]
ENTROPY_COEF = 0.01


def problem(arguments: argparse.Namespace) -> dict[str, Any]:
    """Random rows close to their proximal and behaviour policies."""
    import torch

    g = torch.Generator().manual_seed(0)
    rows, width, vocab = arguments.rows, arguments.hidden, arguments.vocab
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    hidden = torch.randn(rows, width, generator=g).to(device, dtype).requires_grad_()
    weight = torch.empty(vocab, width).normal_(std=width**-0.5, generator=g).to(device, dtype).requires_grad_()
    prox = torch.full((rows,), -12.0) + 0.1 * torch.randn(rows, generator=g)
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": torch.randint(0, vocab, (rows,), generator=g).to(device),
        "prox": prox.to(device),
        "behave": (prox + 0.1 * torch.randn(rows, generator=g)).to(device),
        "advantages": torch.randn(rows, generator=g).to(device),
        "at": (torch.rand(rows, generator=g) < 0.08).nonzero().squeeze(1).to(device),
    }


def floor(p: dict[str, Any]) -> None:
    """The three products of a head, with a chunk of logits."""
    import torch

    hidden, weight = p["hidden"].detach(), p["weight"].detach()
    chunk = 4096 if hidden.is_cuda else 256
    logits = torch.empty(chunk, len(weight), device=hidden.device, dtype=hidden.dtype)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    for start in range(0, len(hidden), chunk):
        h = hidden[start : start + chunk]
        out = logits[: len(h)]
        torch.mm(h, weight.t(), out=out)
        torch.mm(out, weight, out=grad_hidden[start : start + chunk])
        if h.dtype is torch.float32:
            grad_weight.addmm_(out.t(), h)
        else:
            torch.addmm(grad_weight, out.t(), h, out_dtype=torch.float32, out=grad_weight)


def naive(p: dict[str, Any], *, at: Any = None, entropy_coef: float = 0.0) -> None:
    """All logits at once, and autograd."""
    import torch

    hidden, columns = p["hidden"], [p[name] for name in ("targets", "prox", "behave", "advantages")]
    if at is not None:
        hidden, columns = hidden[at], [column[at] for column in columns]
    targets, prox, behave, advantages = columns
    logp_all = (hidden @ p["weight"].t()).float().log_softmax(-1)
    logp = logp_all.gather(1, targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_coef > 0):
        entropy = -(logp_all.exp() * logp_all).sum(-1)
    loss = plain_surrogate(logp, prox, behave, advantages).sum() - entropy_coef * entropy.sum()
    (loss / len(targets)).backward()


def plain_surrogate(logp: Any, prox: Any, behave: Any, advantages: Any) -> Any:
    """The objective, left to autograd."""
    import torch

    ratio = (logp - prox).exp()
    pg = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    pg = torch.minimum(pg, 3.0 * advantages.abs())
    weight = (prox - behave).exp()
    return torch.where(weight <= 5.0, weight * pg, 0.0)


def ours(p: dict[str, Any], *, at: Any = None, entropy_coef: float = 0.0) -> None:
    """The product's."""
    from megatron_webrl.algorithm import fused_linear_grpo_loss

    columns = [p[name] if at is None else p[name][at] for name in ("targets", "prox", "behave", "advantages")]
    loss, _ = fused_linear_grpo_loss(
        p["hidden"], p["weight"], *columns, denominator=len(columns[0]), at=at, entropy_coef=entropy_coef
    )
    loss.backward()


def liger(p: dict[str, Any]) -> None:
    """Liger's chunked GRPO loss, with its options for the same objective."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(
        beta=0.0, epsilon_low=0.2, epsilon_high=0.2, delta=3.0, use_ref_model=False, compiled=False
    )
    rows = len(p["targets"])
    sequence = 256  # it wants sequences [B, T], and takes one of them at a time
    shaped = {name: p[name].view(rows // sequence, sequence) for name in ("targets", "prox", "behave")}
    loss, _ = head(
        p["hidden"].view(rows // sequence, sequence, -1),
        p["weight"],
        shaped["targets"],
        attention_mask=shaped["targets"].new_ones(shaped["targets"].shape),
        advantages=p["advantages"].view(-1, sequence)[:, 0],
        old_per_token_logps=shaped["prox"],
        vllm_is_ratio=(shaped["prox"] - shaped["behave"]).exp(),
    )
    loss.backward()


def trl(p: dict[str, Any]) -> None:
    """The head of its GRPO trainer (`add_fused_lm_head`), with its chunk of the vocabulary; the surrogate outside."""
    from trl.kernels import ChunkedLogProbFunction

    wanted = ("log_probs", "entropy")
    logp, *_ = ChunkedLogProbFunction.apply(
        p["hidden"], p["weight"], None, p["targets"], 1.0, 32_768, None, 1.0, wanted
    )
    (plain_surrogate(logp, p["prox"], p["behave"], p["advantages"]).sum() / len(logp)).backward()


def cce(p: dict[str, Any]) -> None:
    """Apple's cross entropy; the Triton one needs a GPU."""
    from cut_cross_entropy import linear_cross_entropy

    kind = "cce" if p["hidden"].is_cuda else "torch_compile"
    exact = {"filter_eps": None} if p["hidden"].is_cuda else {}  # else gradients of unlikely tokens are left out
    linear_cross_entropy(p["hidden"], p["weight"], p["targets"], impl=kind, **exact).backward()


def workload(case: str, p: dict[str, Any]) -> Callable[[], None]:
    """What a case runs."""
    if case == "floor" or case in PEER_PACKAGES:
        return lambda: globals()[case](p)
    function = naive if case.startswith("naive") else ours
    at = p["at"] if case.endswith("8_percent") else None
    return lambda: function(p, at=at, entropy_coef=ENTROPY_COEF if case.endswith("_entropy") else 0.0)


def measure(case: str, arguments: argparse.Namespace) -> dict[str, float]:
    """In this process: extra bytes and seconds of one case."""
    import torch

    torch.set_num_threads(arguments.threads)
    p = problem(arguments)
    run = workload(case, p)
    if arguments.device == "cuda":
        best = float("inf")
        for _ in range(4):
            p["hidden"].grad = p["weight"].grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            run()
            ended.record()
            torch.cuda.synchronize()
            best, extra = min(best, began.elapsed_time(ended) / 1e3), torch.cuda.max_memory_allocated() - before
        return {"extra_bytes": float(extra), "gpu_seconds": best}
    torch.randn(64, 64) @ torch.randn(64, 64)  # libraries are loaded
    if case in PEER_PACKAGES or case.startswith("ours"):  # imports, and what is compiled at first use
        # no two sizes alike: torch.compile would take them for one, and compile again in the measured call
        small = argparse.Namespace(**{**vars(arguments), "rows": 256, "vocab": arguments.hidden + 1000})
        workload(case, problem(small))()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, began = resident_peak(), time.process_time()
    run()
    seconds = time.process_time() - began
    return {"extra_bytes": float(resident_peak() - before), "cpu_seconds": seconds}


def resident_peak() -> int:
    """Most bytes that this process held since the peak was last forgotten."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def install_peer(case: str) -> None:
    """Its package beside, not in, the project's environment; torch is shared."""
    target = PEERS / case
    if not target.exists():
        command = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(target), PEER_PACKAGES[case]]
        subprocess.run([sys.executable, *command], check=True, timeout=600)


def run_apart(case: str, arguments: argparse.Namespace) -> dict[str, float] | None:
    """A case in a process of its own; None if a peer cannot be installed or does not run here, with the reason said."""
    environment = dict(os.environ)
    try:
        if case in PEER_PACKAGES:
            install_peer(case)
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(PEERS / case), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        line = [sys.executable, "-m", "benchmarks.loss", "--only", case]
        for name in ("rows", "hidden", "vocab", "threads", "device", "dtype"):
            line += [f"--{name}", str(getattr(arguments, name))]
        done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.SubprocessError as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        if case not in PEER_PACKAGES:
            raise SystemExit(f"{case} failed: {reason}") from None
        print(f"{case} did not run here: {reason}", file=sys.stderr)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048, help="tokens T; a multiple of 256")
    parser.add_argument("--hidden", type=int, default=512, help="width d")
    parser.add_argument("--vocab", type=int, default=151_936, help="V")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="the best of so many runs of each case, taken in turn")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    found: dict[str, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for case in arguments.cases:
            measured = run_apart(case, arguments)
            if measured is not None:
                earlier = found.get(case, measured)
                found[case] = {metric: min(value, earlier[metric]) for metric, value in measured.items()}
    rows = []
    for case, metrics in found.items():
        rows += [row(case, metric, value, "B" if metric == "extra_bytes" else "s") for metric, value in metrics.items()]
    for case, base in (
        ("ours", "naive"), ("ours_entropy", "naive_entropy"), ("ours_8_percent", "naive"),
        ("ours_8_percent", "naive_8_percent"), ("ours", "floor"), ("liger", "naive"), ("trl", "naive"), ("cce", "naive"),
    ):  # fmt: skip
        if case in found and base in found:
            rows += [
                row(f"{case} / {base}", metric, value / max(1e-9, found[base][metric]), "ratio")
                for metric, value in found[case].items()
            ]
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
