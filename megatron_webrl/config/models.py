"""The configuration of a run: pydantic models, one a room.  The docstring under each field is its reference entry.

Imports no torch: `--dry-run`, `doctor` and `plan` must answer in a second on a login node.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator


def _host_pattern(value: str) -> str:
    if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]*", value):
        raise ValueError("this names no host: write site.org, site.org:8080, *.site.org or *, without scheme and path")
    return value.lower()


HostPattern = Annotated[str, AfterValidator(_host_pattern)]
Pixels = Annotated[int, Field(gt=0, le=16_384)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Level = Annotated[int, Field(ge=1, le=15)]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, docstrings describe fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The policy."""

    path: Path
    """Hugging Face directory of a Qwen3-VL: config.json, safetensors, tokenizer and image processor."""


class TasksConfig(Section):
    """What is practised and what is held out."""

    environment: str = "miniwob"
    """`miniwob`: MiniWoB++, in real Chromium; `webgym`: rows of task files, on the web; `module:Class`: an environment of
    your own (docs/tasks.md)."""
    names: list[str] = []
    """The environment's tasks, for example `click-test` of MiniWoB++; webgym has its files instead."""
    train_file: Path | None = None
    """Of webgym: JSONL of the tasks to practise."""
    held_out_file: Path | None = None
    """Of webgym: JSONL of the tasks of evaluation; none may be in `train_file`."""
    train_seeds: tuple[int, int] = (0, 1500)
    """Page seeds of training: first, end (exclusive)."""
    held_out_seeds: tuple[int, int] = (500_000, 600_000)
    """Page seeds of evaluation: first, end (exclusive); must not overlap `train_seeds`."""
    demonstration_seeds: tuple[int, int] = (0, 60)
    """Page seeds that the scripted oracle demonstrates, a task: first, end (exclusive)."""
    horizons: dict[Level, Annotated[int, Field(gt=0)]] = {1: 10, 4: 20, 7: 30}
    """Most steps of an episode by difficulty: level -> steps, for that level and those up to the next one given. Reaching it
    without success is failure."""
    sampler: Literal["uniform", "difficulty", "adaptive"] = "uniform"
    """Which name a train group gets: `uniform`: all in turn; `difficulty`: by `difficulty_weights`; `adaptive`: by how likely
    its rewards are to differ, at the success measured lately."""
    difficulty: dict[str, Level] = {}
    """Level of names, 1 (easy) to 15, as `click-test: 1`; names without one have 1."""
    difficulty_weights: dict[Level, Annotated[float, Field(ge=0)]] = {}
    """Of `sampler: difficulty`: levels are drawn in these proportions, as `{1: 2, 4: 5, 7: 3}`, and names of a level alike; a
    level without a weight has 1."""

    def level(self, name: str) -> int:
        """Difficulty of a task's name."""
        return self.difficulty.get(name, 1)

    @model_validator(mode="after")
    def _source(self) -> TasksConfig:
        files = {"train_file": self.train_file, "held_out_file": self.held_out_file}
        if self.environment == "webgym":
            if missing := [key for key, file in files.items() if file is None]:
                raise ValueError(f"tasks.{missing[0]}=null with tasks.environment=webgym: give a JSONL file of tasks")
            if self.names:
                raise ValueError(
                    f"tasks.names={self.names} has no meaning with tasks.environment=webgym, whose tasks are rows of files: "
                    "leave it out"
                )
            if self.sampler == "adaptive":
                raise ValueError(
                    "tasks.sampler=adaptive learns a task's success from its groups, and rows of tasks.environment=webgym are "
                    "rarely drawn twice: use uniform or difficulty"
                )
            return self
        if not self.names:
            raise ValueError(
                f"tasks.names=[] with tasks.environment={self.environment}: name the tasks to practise, as [click-test]"
            )
        for key, file in files.items():
            if file is not None:
                raise ValueError(
                    f"tasks.{key}={file} has no meaning with tasks.environment={self.environment}: leave it out, or set "
                    "tasks.environment=webgym"
                )
        return self

    @model_validator(mode="after")
    def _ranges(self) -> TasksConfig:
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"tasks.names has {twice[0]!r} more than once: give each task once")
        for key in ("train_seeds", "held_out_seeds", "demonstration_seeds"):
            first, end = getattr(self, key)
            if not 0 <= first < end:
                raise ValueError(f"tasks.{key}=[{first}, {end}] is an empty range: give first < end, both ≥ 0")
        if max(self.train_seeds[0], self.held_out_seeds[0]) < min(self.train_seeds[1], self.held_out_seeds[1]):
            raise ValueError(
                f"tasks.held_out_seeds={list(self.held_out_seeds)} overlaps tasks.train_seeds={list(self.train_seeds)}: "
                "move one of them, or held-out success would be measured on practised pages"
            )
        return self

    def horizon(self, level: int) -> int:
        """Most steps of an episode of a task of that difficulty."""
        return self.horizons[max(known for known in self.horizons if known <= level)]

    @model_validator(mode="after")
    def _levels(self) -> TasksConfig:
        if 1 not in self.horizons:
            raise ValueError(
                f"tasks.horizons={self.horizons} has none for level 1: give one, as {{1: 10, 4: 20, 7: 30}}"
            )
        for name, level in self.difficulty.items():
            if name not in self.names:
                raise ValueError(
                    f"tasks.difficulty.{name}={level} is of no task in tasks.names: add the name or remove it"
                )
        if self.difficulty_weights and self.sampler != "difficulty":
            raise ValueError(
                f"tasks.difficulty_weights={self.difficulty_weights} has no meaning with tasks.sampler={self.sampler}: set "
                "tasks.sampler=difficulty or remove the weights"
            )
        if self.environment == "webgym":
            return self
        levels = {self.level(name) for name in self.names}
        if self.sampler == "difficulty" and len(levels) == 1:
            raise ValueError(
                f"tasks.sampler=difficulty has nothing to choose from, all of tasks.names have level {min(levels)}: give "
                "tasks.difficulty, or use tasks.sampler=uniform"
            )
        for level, weight in self.difficulty_weights.items():
            if level not in levels:
                raise ValueError(
                    f"tasks.difficulty_weights.{level}={weight:g} is of a level that no task has: remove it, or give "
                    "tasks.difficulty"
                )
        if not any(self.difficulty_weights.get(level, 1) for level in levels):
            raise ValueError(
                f"tasks.difficulty_weights={self.difficulty_weights} leaves no task to draw: give a level more than 0"
            )
        return self


class AgentConfig(Section):
    """What the policy sees and how its replies are read."""

    prompt: Literal["short", "vanilla", "progress", "additive_memory", "compressive_memory"] = "additive_memory"
    """What a reply holds before its call: `vanilla`: Intention and Action; `progress`: Progress (JSON) before them;
    `additive_memory` and `compressive_memory`: Memory (JSON) before that, which only grows, or is rewritten at each step.
    `short`: nothing; one line instead of the tool's schema, for tiny models."""
    thinking: bool = False
    """For Thinking models: the reply begins with a thought, which no later prompt repeats."""
    history_steps: int = Field(default=30, ge=0)
    """Earlier steps told as one text line each, at most."""
    history_window: int = Field(default=1, gt=0)
    """Newest screenshots in the prompt, the present one included, at most."""
    max_prompt_tokens: int = Field(default=12_288, gt=0)
    """Of a prompt, images expanded: the oldest lines, then the oldest screenshots are left out of a longer one; if that is
    not enough the episode ends as failure (context overflow)."""
    max_malformed: int = Field(default=3, gt=0)
    """So many malformed replies in a row end the episode as failure."""
    coordinate_step: int = Field(default=1, gt=0, le=100)
    """Coordinates of demonstrations (0 to 1000) are rounded to multiples of it; coarse ones are easier for tiny models."""
    episode_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds that an episode's own steps may take; waiting for an engine is not counted."""


class BrowserConfig(Section):
    """Browser workers: one Chromium each, N slots."""

    workers: int = Field(default=1, gt=0)
    """Worker processes."""
    slots: int = Field(default=8, gt=0)
    """Episodes at once in a worker."""
    executable: Path | None = None
    """Chromium (headless shell preferred); null: found on the system, then Playwright's own download."""
    viewport: tuple[Pixels, Pixels] = (1280, 768)
    """Width and height of the page, pixels."""
    screenshot_format: Literal["png", "jpeg"] = "png"
    """What a screenshot is encoded as, for engine and trainer alike; `jpeg` is several times cheaper to decode, and smaller
    except for flat pages."""
    jpeg_quality: int = Field(default=90, ge=1, le=100)
    """Of `screenshot_format: jpeg`."""
    screenshot: tuple[Pixels, Pixels] | None = None
    """Width and height of the part that the agent sees, from the top left corner; null: the whole viewport."""
    action_timeout_s: float = Field(default=20.0, gt=0)
    """Deadline of one browser call."""
    pages: int | None = Field(default=None, gt=0)
    """Most open pages of a worker, about 25 MB each: idle ones stay ready for another episode of the task they showed.
    group_size × tasks is ideal; null: 4 × slots."""
    spare_contexts: int = Field(default=1, ge=0)
    """Fresh contexts that a worker makes ready ahead, about 25 MB each, so that an episode need not wait for its own."""
    recycle_episodes: int = Field(default=2000, gt=0)
    """A Chromium is replaced after so many episodes."""
    slot_bytes: int = Field(default=768 << 20, gt=0)
    """A Chromium whose processes hold more than so many bytes a slot (PSS) is replaced as its episodes end; one that holds
    twice as many is killed, which its episodes survive as faults do: they are issued again."""
    settle_quiet_s: float = Field(default=0.1, ge=0)
    """After an action the page counts as settled when its layout, its finite animations, its images and the network have
    been quiet for so long; 0: for two frames."""
    settle_limit_s: float = Field(default=5.0, ge=0)
    """Longest wait for a page to settle; then the agent sees it as it is."""
    allow_hosts: list[HostPattern] = ["*"]
    """Hosts that pages of the web may reach (MiniWoB++ reaches none): `site.org`, `site.org:8080`, `*.site.org` (with site.org
    itself), `*` for all. Addresses that are not public are refused whatever this says, see `private_hosts`."""
    deny_hosts: list[HostPattern] = []
    """Hosts that are refused although `allow_hosts` has them; a judge's or a tracker's, for example."""
    private_hosts: list[HostPattern] = []
    """Hosts that may have private or loopback addresses: sites of your own, as `shop.local:7770` (they must be allowed too).
    Link-local addresses, where clouds keep their metadata, stay refused."""
    credentials: dict[HostPattern, list[Annotated[SecretStr, Field(min_length=4)]]] = {}
    """Host -> secrets (passwords, keys) that the agent may type there and nowhere else. Password fields take text only on
    these hosts, and in pages of the environment's own files. Masked wherever the configuration is written."""

    @property
    def page_limit(self) -> int:
        """Most open pages of a worker; never fewer than slots."""
        return max(self.slots, self.pages or 4 * self.slots)

    @property
    def view(self) -> tuple[int, int]:
        """Width and height that the agent sees."""
        return self.screenshot or self.viewport


class JudgeConfig(Section):
    """The rubric judge: a model behind an OpenAI-compatible endpoint that sees screenshots.  Limits are a worker's."""

    url: str | None = Field(default=None, pattern=r"^https?://")
    """Base URL, as `http://judge:8000/v1`; null: tasks that need a rubric judge are refused."""
    model: str = ""
    """Its name there."""
    api_key_env: str | None = None
    """Environment variable of the workers that holds the API key; null: none is sent."""
    images: int = Field(default=4, gt=0)
    """Screenshots that it sees at once: the most relevant ones, the last among them."""
    max_tokens: int = Field(default=1024, gt=0)
    """Of one reply."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one request."""
    deadline_s: float = Field(default=900.0, gt=0)
    """Deadline of one judgement; then it is a judge fault, and the attempt is issued again."""
    retries: int = Field(default=4, ge=0)
    """Of one request: after time-outs, 429 and 5xx, with back-off, and after replies that are no verdict."""
    concurrent: int = Field(default=8, gt=0)
    """Most requests at once."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests a minute; null: no limit."""
    cache_entries: int = Field(default=4096, ge=0)
    """Verdicts that are kept in memory, by content, so that the same question is not paid twice."""
    price_prompt: float = Field(default=0.0, ge=0)
    """Of a million prompt tokens, in the currency of `judge/cost`."""
    price_completion: float = Field(default=0.0, ge=0)
    """Of a million completion tokens."""


class SamplingConfig(Section):
    """How replies are sampled."""

    temperature: float = Field(default=1.0, gt=0)
    """Of training; the logprobs of engine and trainer are taken at it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1: the policy that trains is the whole distribution; `evaluation.top_p` may be less."""
    top_k: int = Field(default=0, ge=0)
    """Must be 0 (off), likewise; `evaluation.top_k` need not."""
    max_new_tokens: int = Field(default=1024, gt=0)
    """A longer reply is cut and marked `length`."""
    stop: list[str] = []
    """Texts that end a reply beside the end token, in training and evaluation. Each must be one token of the model, as
    `<|endoftext|>`, and no part of a tool call; it is trained like the end token, and left out of the text that is parsed."""

    @model_validator(mode="after")
    def _untruncated(self) -> SamplingConfig:
        if self.top_p < 1 or self.top_k:
            key, value, off = ("top_p", f"{self.top_p:g}", 1) if self.top_p < 1 else ("top_k", str(self.top_k), 0)
            raise ValueError(
                f"sampling.{key}={value} would sample training episodes from a truncated distribution, while the trainer's "
                f"logprobs are those of the whole one: leave it at {off}; for evaluation set evaluation.{key}"
            )
        return self


class EngineConfig(Section):
    """SGLang servers."""

    hosts: int = Field(default=1, gt=0)
    """Engine hosts, each with one SGLang."""
    tp: int = Field(default=1, gt=0)
    """Tensor-parallel size of each SGLang."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Loopback port of the first SGLang, the next ones count up; null: free ports."""
    max_total_tokens: int | None = Field(default=None, gt=0)
    """Size of the KV pool in tokens; null: SGLang decides."""
    max_running_requests: int = Field(default=64, gt=0)
    """Most requests that one SGLang runs at once."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Grace of a cold start before it counts as failed."""
    health_timeout_s: float = Field(default=60.0, gt=0)
    """An SGLang that should serve and gives no sign of life for so long is killed and restarted."""
    request_timeout_s: float = Field(default=120.0, gt=0)
    """A reply that takes longer, the engine's absence included, is a fault."""
    hosts_per_worker: int = Field(default=4, gt=0)
    """Engine hosts that a browser worker spreads its requests over, of those that live."""
    image_cache_bytes: int = Field(default=256 << 20, ge=0)
    """Screenshots that an engine host keeps, so that those of a window are not sent again each step."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one SGLang in a run before the run ends with an error."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads of each SGLang where it runs on a CPU; null: all cores."""
    args: dict[str, Any] = {}
    """Further SGLang options, as `name: value` (`attention-backend: fa3`); true means a flag."""

    @model_validator(mode="after")
    def _ours(self) -> EngineConfig:
        ours = {"model-path": "model.path", "device": "device", "tp": "engine.tp", "port": "engine.port"}
        ours |= dict.fromkeys(
            (
                "host",
                "weight-version",
                "skip-tokenizer-init",
                "disable-overlap-schedule",
                "incremental-streaming-output",
            ),
            "nothing: it is fixed",
        )
        for name in self.args:
            if key := ours.get(name.replace("_", "-")):
                raise ValueError(f"engine.args.{name} is the project's own to set: use {key}")
        return self


class RefreshConfig(Section):
    """How weights get from the trainer into the engines."""

    transport: Literal["broadcast", "disk"] = "broadcast"
    """`broadcast`: over NCCL (GPUs) or gloo (CPUs), bucket by bucket, engines that cannot be reached so from disk; `disk`: all
    from an export under `run_dir`, which every engine must see."""
    mode: Literal["retract", "in_place"] = "retract"
    """Requests in flight: `retract`: their tokens stay and their KV is computed again with the new weights; `in_place`: they
    go on at once, on KV of the weights before. Either way each token has the version that sampled it."""
    bucket_bytes: int = Field(default=512 << 20, gt=0)
    """Most bytes of one broadcast; a larger tensor goes alone."""
    cell: int | None = Field(default=None, gt=0)
    """Engines refreshed at once, the cells in turn while the others generate; null: all."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of each step of a refresh; an engine that misses it is restarted and joins again."""
    verify_every: int = Field(default=50, ge=0)
    """After the first refresh and every so many, engines' weights are compared, by checksum, with those of a second load of
    the same export; a difference ends the run. 0: never."""


class WireConfig(Section):
    """Sockets between roles."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """`ipc`: Unix sockets, on one machine; `tcp`: as between machines, encrypted and authenticated (CURVE, keys made per run)."""


class ReplayConfig(Section):
    """Groups, batches and staleness."""

    group_size: int = Field(default=8, gt=1)
    """G: episodes of one task that are normalised together."""
    groups_per_step: int = Field(default=16, gt=0)
    """B: groups of a train step."""
    eta: int = Field(default=2, ge=0)
    """η: most policy versions that a response token may lag when training on it starts; 0 is strictly synchronous."""
    dynamic_sampling: bool = True
    """Drop groups whose rewards are all equal, and gather until B mixed groups are there."""
    max_concurrent_episodes: int = Field(default=1280, gt=0)
    """Episodes at once, over all workers."""
    max_attempts: int = Field(default=4, gt=0)
    """Attempts at one episode when faults strike; then its group is dropped as `group_faults`."""
    lease_s: float = Field(default=15.0, gt=0)
    """A worker unheard for so long has lost its attempts; they are issued again."""
    take_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for one batch before the run ends with an error that says what was missing."""
    stale: Literal["drop", "wait"] = "drop"
    """What becomes of a group that is too slow to be fresh: `drop` it when a batch is taken, or `wait` with the batch (and so
    with the next version) for running groups that the next version would make too stale, at most agent.episode_deadline_s
    from their last attempt's start."""
    attempt_limit_s: float = Field(default=7200.0, gt=0)
    """Backstop of an attempt's wall time, waiting for engines included: then it is taken from its worker and issued again."""
    queue_bytes: int = Field(default=4 << 30, gt=0)
    """Bound of the finished trajectories (their tokens, not their screenshots) that are kept on disk until their train step is
    in a durable checkpoint; when it is reached no new groups begin."""
    screenshot_bytes: int = Field(default=50 << 30, gt=0)
    """Bound of the screenshots on disk, which stay until the checkpoint with their train step is durable: when four fifths
    are in use no new groups begin (and a checkpoint is saved, if that makes room), when all are, uploads wait."""
    screenshot_dir: Path | None = None
    """Where screenshots are kept; a disk of the store's machine is faster than a shared one. null: `screenshots/` in run_dir."""


class AlgorithmConfig(Section):
    """GRPO as in AsyncWebRL (arXiv:2606.05597), or RAFT++."""

    objective: Literal["grpo", "raft++"] = "grpo"
    """`grpo`: advantages normalised within groups; `raft++`: only successes train, with advantage r / number of steps
    (needs constant_horizon null and replay.dynamic_sampling false)."""
    constant_horizon: float | None = Field(default=10.0, gt=0)
    """k: step advantage = normalised reward / k; null: / number of steps of the episode."""
    unbiased_std: bool = False
    """Divide by G−1 in the group's standard deviation."""
    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    """ε of the clipped ratio to the proximal policy: ratios below 1−ε are clipped, and above 1+ε."""
    eps_clip_high: float | None = Field(default=None, gt=0)
    """ε above 1 (clip-higher); null: eps_clip."""
    c_clip: float | None = Field(default=3.0, gt=1)
    """c of the dual clip: token loss ≤ c·|A|; null leaves it out."""
    behave_weight_cap: float = Field(default=5.0, gt=0)
    """Cap of the weight π_prox/π_behave of a token."""
    over_cap: Literal["drop", "truncate"] = "drop"
    """Tokens with a weight above the cap: `drop` leaves them out (they count in the mean), `truncate` gives them the cap
    (truncated importance sampling)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    normalizer: Literal["token_mean", "group_constant"] = "token_mean"
    """What the summed loss is divided by: `token_mean`: all response tokens of the minibatch; `group_constant`: its
    episodes, so that long episodes weigh more (1/k is in the advantage)."""
    epochs: int = Field(default=3, gt=0)
    """Passes over a batch."""
    minibatches: int = Field(default=2, gt=0)
    """Optimizer updates a pass; groups stay whole."""

    @model_validator(mode="after")
    def _objective(self) -> AlgorithmConfig:
        if self.objective == "raft++" and self.constant_horizon is not None:
            raise ValueError(
                f"algorithm.constant_horizon={self.constant_horizon:g} has no meaning with algorithm.objective=raft++, whose "
                "advantage is r / number of steps: set it to null"
            )
        if self.objective == "raft++" and self.unbiased_std:
            raise ValueError(
                "algorithm.unbiased_std=true has no meaning with algorithm.objective=raft++, which normalises nothing: "
                "switch it off"
            )
        return self


class OptimizerConfig(Section):
    """AdamW through Megatron's optimizer."""

    lr: float = Field(default=5e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled; not on norms and biases."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up; stepped once a train step."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate / peak."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Steps until the final learning rate; null: the run's steps."""


class ParallelConfig(Section):
    """Megatron's layout."""

    tp: int = Field(default=1, gt=0)
    """Tensor-parallel size."""
    pp: int = Field(default=1, gt=0)
    """Pipeline-parallel size; all deepstack layers must be on the first stage."""
    first_stage_layers: int | None = Field(default=None, gt=0)
    """Decoder layers of the first pipeline stage, which also holds the vision tower; the other stages share the rest
    evenly. null: all stages the same."""
    vp: int = Field(default=1, gt=0)
    """Virtual pipeline: model chunks a stage holds, of the interleaved schedule, which idles less; all deepstack layers must
    be in the first chunk."""
    dp: int = Field(default=1, gt=0)
    """Data-parallel size."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions; needs tp > 1."""
    distributed_optimizer: bool = False
    """Shard the optimizer's state over data parallelism."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data parallelism during the last micro-batch's backward pass instead of after it."""

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return self.tp * self.pp * self.dp

    def stage_layers(self, layers: int) -> list[int]:
        """Decoder layers of each pipeline stage, or of each model chunk where a stage holds `vp` of them (chunk j is on stage
        j mod pp).  Raises ValueError, naming the keys, if `layers` cannot be cut so."""
        if self.vp > 1:
            if layers % (self.pp * self.vp):
                fit = [n for n in range(1, layers + 1) if layers % (self.pp * n) == 0]
                raise ValueError(
                    f"trainer.parallel.vp={self.vp} with trainer.parallel.pp={self.pp} does not divide the model's {layers} "
                    f"decoder layers: use a vp of {fit or 1}, or another pp"
                )
            return [layers // (self.pp * self.vp)] * (self.pp * self.vp)
        first = layers // self.pp if self.first_stage_layers is None else self.first_stage_layers
        each, left = divmod(layers - first, max(1, self.pp - 1))
        if left or each < (self.pp > 1) or (self.first_stage_layers is None and layers % self.pp):
            if self.first_stage_layers is None:
                fit = [n for n in range(1, layers + 1) if layers % n == 0]
                raise ValueError(
                    f"trainer.parallel.pp={self.pp} does not divide the model's {layers} decoder layers: use one of {fit}, or "
                    "set trainer.parallel.first_stage_layers"
                )
            fit = [n for n in range(1, layers) if (layers - n) % (self.pp - 1) == 0 and layers - n >= self.pp - 1]
            raise ValueError(
                f"trainer.parallel.first_stage_layers={first} leaves {layers - first} of the model's {layers} decoder layers, "
                f"which the other {self.pp - 1} stages cannot share evenly: use one of {fit}"
            )
        return [first, *[each] * (self.pp - 1)]

    @model_validator(mode="after")
    def _layout(self) -> ParallelConfig:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "trainer.parallel.sequence_parallel=true needs trainer.parallel.tp > 1 (it is 1): set tp or switch it off"
            )
        if self.vp > 1 and self.pp == 1:
            raise ValueError(
                f"trainer.parallel.vp={self.vp} needs trainer.parallel.pp > 1 (it is 1): set pp or leave it out"
            )
        if self.vp > 1 and self.first_stage_layers is not None:
            raise ValueError(
                f"trainer.parallel.first_stage_layers={self.first_stage_layers} has no meaning with trainer.parallel.vp="
                f"{self.vp}, whose chunks are all the same: leave one of them out"
            )
        if self.first_stage_layers is not None and self.pp == 1:
            raise ValueError(
                f"trainer.parallel.first_stage_layers={self.first_stage_layers} needs trainer.parallel.pp > 1 (it is 1): set "
                "pp or leave it out"
            )
        return self


class TrainerConfig(Section):
    """The Megatron trainer."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations; gradients are accumulated in float32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations, of language model and vision tower, that the backward pass computes again instead of keeping: `selective`:
    those of the MLPs; `full`: all but each layer's input, a third more computation."""
    packing: bool = True
    """Rows of a micro-batch lie end to end in one sequence, none seeing another; false pads them to the longest (not with
    parallel.vp > 1)."""
    max_tokens_per_microbatch: int = Field(default=16_384, gt=0)
    """Most tokens of a micro-batch, padding included; a longer row is alone."""
    pixel_bytes: int = Field(default=4 << 30, gt=0)
    """Bound of the decoded screenshots that the lead of a data-parallel shard keeps (uint8, 3 MB at 1280 × 768)."""
    image_threads: int | None = Field(default=None, gt=0)
    """Threads a lead that decode screenshots as they arrive; null: the machine's cores divided by the leads on it."""
    steps: int = Field(default=300, gt=0)
    """Train steps of the run."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Ends the RL phase earlier."""
    checkpoint_every: int = Field(default=20, gt=0)
    """Train steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = Field(default=2, gt=0)
    """Older ones are deleted."""
    async_checkpoints: bool = True
    """Train on while a checkpoint is written, from a copy of this rank's weights and optimizer state in host memory; false
    waits and needs no copy."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads a rank; null: the cores divided by the ranks."""
    loss_backend: Literal["auto", "torch", "triton"] = "auto"
    """Row operations of the fused loss; `auto`: Triton on CUDA where it is installed, else torch."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of every collective between trainer ranks."""
    max_logprob_diff: float | None = Field(default=None, gt=0)
    """Budget of the largest |engine − trainer| logprob at tokens of the newest version. null: 1e-3 in float32, none in
    bfloat16 (it is logged)."""
    mean_logprob_diff: float | None = Field(default=None, gt=0)
    """Budget of their mean. null: 1e-4 in float32, 0.02 in bfloat16."""
    logprob_mismatch: Literal["warn", "stop"] = "warn"
    """When a step or a refresh exceeds either budget: `warn`: the log says so and the run goes on
    (`engine/logprob_over_budget`); `stop`: it ends with an error."""

    @model_validator(mode="after")
    def _virtual(self) -> TrainerConfig:
        if self.parallel.vp > 1 and not self.packing:
            raise ValueError(
                f"trainer.packing=false does not go with trainer.parallel.vp={self.parallel.vp}, whose micro-batches have one "
                "shape: switch packing on, or leave vp out"
            )
        return self


class SftConfig(Section):
    """Supervised warm start on demonstrations."""

    steps: int = Field(default=160, gt=0)
    """Optimizer updates."""
    batch_size: int = Field(default=16, gt=0)
    """Rows (steps of demonstrations) an update, over all data-parallel ranks."""
    optimizer: OptimizerConfig = OptimizerConfig(
        lr=2e-3,
        betas=(0.9, 0.99),
        weight_decay=0.01,
        clip_grad=0.13,
        schedule="cosine",
        warmup_steps=50,
        min_lr_ratio=0.05,
    )


class EvaluationConfig(Section):
    """Success on held-out tasks: before and after training, beside it, or alone (`megatron-webrl eval`)."""

    episodes: int = Field(default=1000, ge=0)
    """Tasks each time, spread evenly over the held-out ones; 0 leaves evaluation out."""
    seeds: int = Field(default=1, gt=0)
    """Episodes a task, with as many seeds of the sampler."""
    every: int | None = Field(default=None, gt=0)
    """Train steps between evaluations that run beside training and never hold it up; null: none."""
    share: float = Field(default=0.25, gt=0, lt=1)
    """Of an evaluation beside training: most of the slots that it has at once (but one it may), and of the episodes that are
    begun while train episodes wait for a slot, too."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest tokens with this share of the probability; 1 is all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from so many most likely tokens; 0 is all."""
    timeout_s: float = Field(default=6 * 3600.0, gt=0)
    """Deadline of an evaluation that training waits for, or that runs alone."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Of `eval`: base URL of an OpenAI-compatible server whose model is measured instead of `model.path`, as
    `http://host:8000/v1`; `model.path` then gives tokenizer and image processor only."""
    endpoint_model: str = ""
    """Its name there."""
    api_key_env: str | None = None
    """Environment variable of the workers that holds the endpoint's API key; null: none is sent."""

    @model_validator(mode="after")
    def _endpoint(self) -> EvaluationConfig:
        if self.endpoint is not None and not self.endpoint_model:
            raise ValueError(
                f"evaluation.endpoint_model='' with evaluation.endpoint={self.endpoint}: name the model that is measured"
            )
        if self.every is not None and not self.episodes:
            raise ValueError(
                f"evaluation.every={self.every} with evaluation.episodes=0 evaluates nothing: give a number of episodes, or "
                "every=null"
            )
        return self


class ObserveConfig(Section):
    """Metrics and traces."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases; JSONL is always written."""
    wandb_project: str = "megatron_webrl"
    """Its project."""
    trace: bool = True
    """Write the spans of every role, for the timeline."""
    record_every: int = Field(default=50, gt=0)
    """Every n-th group is kept with its screenshots under `trajectories/`."""
    record_batches: bool = False
    """Every batch that is trained is kept whole, screenshots too, under `batches/`, for `train_only`; nothing deletes it."""


class RunConfig(Section):
    """A whole run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Shown in logs and wandb."""
    run_dir: Path = Path("runs/run")
    """Everything that the run writes."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of samplers, minibatch order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where torch sees a GPU."""
    train_only: Path | None = None
    """`batches/` of a run: `train` trains on what was recorded there, in order, without rollouts and evaluation."""
    rollout_only: bool = False
    """`train` records `trainer.steps` batches under `batches/` with the weights of `model.path`, and trains nothing."""
    model: ModelConfig
    tasks: TasksConfig
    agent: AgentConfig = AgentConfig()
    browser: BrowserConfig = BrowserConfig()
    judge: JudgeConfig = JudgeConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    refresh: RefreshConfig = RefreshConfig()
    wire: WireConfig = WireConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _cross(self) -> RunConfig:
        if self.rollout_only and self.train_only is not None:
            raise ValueError(
                f"rollout_only=true leaves training out, and train_only={self.train_only} the rollouts: set one of them"
            )
        if self.algorithm.minibatches > self.replay.groups_per_step:
            raise ValueError(
                f"algorithm.minibatches={self.algorithm.minibatches} exceeds replay.groups_per_step="
                f"{self.replay.groups_per_step}: groups are not split, so give at least as many groups"
            )
        if self.algorithm.objective == "raft++" and self.replay.dynamic_sampling:
            raise ValueError(
                "replay.dynamic_sampling=true drops groups in which all succeeded, of which algorithm.objective=raft++ "
                "learns most: switch it off"
            )
        if self.engine.port is not None and self.engine.port + self.engine.hosts > 65536:
            raise ValueError(
                f"engine.port={self.engine.port} with engine.hosts={self.engine.hosts} counts beyond 65535: choose a lower port"
            )
        view, viewport = self.browser.view, self.browser.viewport
        if view[0] > viewport[0] or view[1] > viewport[1]:
            raise ValueError(
                f"browser.screenshot={list(view)} exceeds browser.viewport={list(viewport)}: enlarge the viewport"
            )
        held_out = (self.tasks.held_out_seeds[1] - self.tasks.held_out_seeds[0]) * len(self.tasks.names)
        if self.tasks.names and self.evaluation.episodes > held_out:
            raise ValueError(
                f"evaluation.episodes={self.evaluation.episodes} exceeds the {held_out} pages of tasks.held_out_seeds × "
                "tasks.names: widen held_out_seeds"
            )
        return self
