"""Every message that crosses a socket.  A message is a request or its reply; replies are correlated by the frame's id.

A peer of another protocol version or run is refused with a reason (`Refused`); an exception in a handler comes back as
`Failed`.  Fields of bytes that hold tokens are packed as in `trajectory`.
"""

from __future__ import annotations

import msgspec

from megatron_webrl.trajectory import Assignment, AttemptKey, Group, Task, Trajectory

PROTOCOL = 8
"""Raised whenever a message changes its meaning or its shape."""


class Message(msgspec.Struct, tag=True, gc=False):
    """Base of all messages: tagged by the class name."""


# Replies that any request can get -------------------------------------------------------------------------------------


class Done(Message):
    """The request was carried out; nothing to say."""


class Refused(Message):
    """The peer is of another run or protocol version, or the bytes were malformed."""

    reason: str


class Failed(Message):
    """The handler raised: the request was not carried out."""

    error: str


# Browser worker -> coordinator ----------------------------------------------------------------------------------------


class GetAssignments(Message):
    """Up to `slots` attempts for free slots; the coordinator waits up to `wait_s` for the first.  Renews the leases of
    `running`; a later `session` (they are compared as text) under the same worker name ends the leases of the old one.
    Attempts that were given to this session and never were in `running` did not arrive: they are given again, first.  One that
    was there and is not any more was given up."""

    worker: str
    session: str
    slots: int
    running: list[AttemptKey]
    wait_s: float


class Assignments(Message):
    assignments: list[Assignment]
    revoked: list[AttemptKey] = []
    """Attempts of `running` that are no longer wanted: abandon them."""


class SubmitTrajectory(Message):
    """Idempotent: the key of the assignment makes a repeat recognisable.  Its screenshots are in the store already.  `more`:
    its slot is free now, and wants another attempt, if one can be had at once (not after a repeat)."""

    trajectory: Trajectory
    worker: str
    session: str
    more: bool = False


class Submitted(Message):
    """The trajectory is durable, or not wanted."""

    accepted: bool
    reason: str
    """`accepted`, `repeat` or `superseded`."""
    assignments: list[Assignment] = []
    """At most one, for the same slot."""


# Trainer -> coordinator -----------------------------------------------------------------------------------------------


class Take(Message):
    """The batch of train step `step`, for weights of `version`.  Idempotent for one step: asking again gives the same."""

    step: int
    version: int
    wait_s: float


class Manifest(Message):
    """`ready` false: no batch yet, ask again."""

    step: int
    ready: bool
    begun: bool = True
    """False while nothing is practised yet (start, first evaluation): waiting then has no deadline of its own."""
    group_ids: list[int] = []
    costs: list[int] = []
    """Tokens of each group, in order of `group_ids`: shards can be balanced before anything is fetched."""
    lineage: tuple[tuple[int, int], ...] = ((0, 0),)
    """(first version, offset), ascending: see `replay.Lineage`; lags are counted in positions, not in versions."""
    save: bool = False
    """Save a checkpoint now, then ask again: the screenshots of what was trained fill the store."""
    finished: bool = False
    """Steps or minutes are used up: save, say TrainingFinished, and go on asking until it is time to stop."""
    stop: bool = False
    """The run ends: leave."""


class FetchGroups(Message):
    group_ids: list[int]


class Groups(Message):
    groups: list[Group]


class ListUpcoming(Message):
    """What would a batch for weights of `version` be cut from now?  Changes nothing."""

    version: int


class Upcoming(Message):
    groups: list[tuple[int, list[str]]]
    """(group id, digests of its screenshots): the oldest fresh groups that are queued, at most those of one batch, as far
    as they are there."""


class StepTrained(Message):
    """The step ended.  `version` is on its way to the engines, or (applied_updates = 0) is the old one."""

    step: int
    version: int
    applied_updates: int
    metrics: dict[str, float]


class TrainingFinished(Message):
    """The last checkpoint is durable and the last weights are published."""

    step: int
    version: int


class CheckpointDurable(Message):
    """The checkpoint that contains `step` is whole on disk: what was trained up to it is final."""

    step: int


class TrainerStarted(Message):
    """A trainer begins, with `step` finished steps: in a checkpoint, saved when its weights were `version`, or (−1) with the
    model of the configuration.  What was trained in later steps is rolled back: those batches come again, in the same
    order.  The reply is the version to publish its weights as."""

    step: int
    version: int


class ClaimVersion(Message):
    """A version for the weights that an update made of version `after`: larger than every version ever seen by the run."""

    after: int


class Version(Message):
    version: int


class ListEngines(Message):
    """The hosts that `worker` is to generate on: `engine.hosts_per_worker` live ones, mostly the same each time.  Without a
    worker: all that ever spoke."""

    worker: str = ""


class Engines(Message):
    hosts: list[EngineStatus]


# Engine host -> coordinator, and worker asking for routes ----------------------------------------------------------------


class EngineStatus(Message):
    """Sent by every engine host each second: register, heartbeat and load in one."""

    name: str
    address: str
    """Where it answers Generate and control."""
    state: str
    """`starting`, `waiting_weights`, `serving`, `draining`, `dead`."""
    version: int
    """Policy version it serves; −1 before the first refresh."""
    incarnation: int
    """Names one start of its SGLang, never repeated: a weight group is valid for one incarnation of each member."""
    ranks: int
    """Processes of its SGLang that join a weight group (its tensor-parallel size)."""
    running: int
    """Generations that are not finished, those that wait included."""
    starts: int = 0


# Worker -> engine host: Generate, then PollGeneration until it is finished; each may be repeated -----------------------------


class Generate(Message):
    """Token-in, token-out: begin the generation `request`, or attach to it if it is there already.  Answered within
    `wait_s`, by Generated, Generating, EngineUnavailable, or (nothing has begun) NeedImages."""

    request: str
    """Chosen by who asks, anew for every generation."""
    prompt_ids: bytes
    """int32 packed, one image_pad an image."""
    digests: list[str]
    """One an image_pad."""
    images: dict[str, bytes]
    """Encoded bytes of those that the host may lack."""
    max_new_tokens: int
    """Of the whole reply, `prefix_ids` included."""
    temperature: float
    seed: int
    banned_ids: bytes
    """int32 packed: tokens never sampled."""
    stop_ids: bytes
    """int32 packed: tokens that end the reply (kept in it)."""
    deadline_s: float
    """Seconds after which the host gives up, counted from arrival; waiting for the engine included."""
    wait_s: float
    prefix_ids: bytes = b""
    """int32 packed: what was sampled of this reply elsewhere; it is continued from there."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""


class NeedImages(Message):
    """Ask again, with these."""

    digests: list[str]


class PollGeneration(Message):
    """What is there of it after the first `have` tokens?  Answered as Generate is.  A generation that nobody asks for is
    aborted after a while."""

    request: str
    have: int
    wait_s: float


class CancelGeneration(Message):
    """It is not wanted any more."""

    request: str


class Generating(Message):
    """Not finished.  Of its tokens, those after `have`; a version is exact or (near a refresh) too old, never too new."""

    response_ids: bytes
    """int32 [r]."""
    logprobs: bytes
    """float32 [r]."""
    versions: bytes
    """int32 [r]."""
    waited_s: float
    """As in Generated, so far."""
    running: int


class Generated(Message):
    """The whole reply, but for `prefix_ids`."""

    response_ids: bytes
    """int32 [R]."""
    logprobs: bytes
    """float32 [R]."""
    versions: bytes
    """int32 [R]."""
    finish_reason: str
    """`stop` or `length`."""
    waited_s: float
    """Seconds the request waited for the engine to serve (start, restart or refresh), which are not the episode's."""
    running: int
    """Generations in flight at the host, for routing."""


class EngineUnavailable(Message):
    """The host cannot finish it: its engine died, it drains, the deadline passed, it knows of no such generation.  A fault, not
    the policy's doing.  With the tokens after `have`, from which another host can go on."""

    reason: str
    response_ids: bytes = b""
    """int32 [r]."""
    logprobs: bytes = b""
    """float32 [r]."""
    versions: bytes = b""
    """int32 [r], as in Generating."""
    waited_s: float = 0.0
    """As in Generated; what was sampled and lost counts as waited."""


# Driver -> engine host ------------------------------------------------------------------------------------------------


class Drain(Message):
    """Begin no generation, finish those in flight, then leave; after `timeout_s` the rest is interrupted, tokens kept.
    Replied to at once."""

    timeout_s: float


# Trainer -> engine host: a refresh is Join (once for a set of members and a stage), then Begin … Load (one a bucket) … End -----


class JoinWeightGroup(Message):
    """Join the collective group in which rank 0 is a pipeline stage of the trainer.  Replied to when the group stands."""

    group: str
    backend: str
    """`gloo` or `nccl`."""
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


class LeaveWeightGroup(Message):
    group: str
    timeout_s: float


class BeginRefresh(Message):
    """Stop generation; in-flight requests are kept.  A host that got this serves nothing until `EndRefresh` or `LoadFromDisk`."""

    version: int
    timeout_s: float


class LoadBucket(Message):
    """Receive one flattened bucket by broadcast from rank 0 of the group."""

    group: str
    names: list[str]
    """Hugging Face names."""
    dtypes: list[str]
    """`float32`, `bfloat16`, …"""
    shapes: list[list[int]]
    timeout_s: float
    version: int | None = None
    """With the last bucket: tag tokens with it from now on, and drop the prefix KV."""


class GiveUpBroadcast(Message):
    """Another member of the group was lost: a broadcast that does not end within `grace_s` never will."""

    grace_s: float


class EndRefresh(Message):
    """The weights are whole: go on."""

    version: int
    timeout_s: float


class Checksum(Message):
    """Hash of the engine's own parameters."""

    timeout_s: float


class ChecksumValue(Message):
    value: str
    version: int
    """That it serves."""


class LoadFromDisk(Message):
    """Load an export (a Hugging Face directory) as `version`, also in the middle of a refresh, and serve it."""

    path: str
    version: int
    timeout_s: float


# Trainer rank 0 -> the first rank of each pipeline stage, which holds that stage's weights ---------------------------------


class OpenRendezvous(Message):
    """Listen for the members of a new weight group.  The reply is where they meet."""

    group: str
    world_size: int
    timeout_s: float


class Rendezvous(Message):
    address: str
    port: int


class StandGroup(Message):
    """Join the opened group as rank 0.  Replied to when it stands."""

    group: str
    timeout_s: float


class SendBucket(Message):
    """Broadcast a bucket of the plan, as soon as the snapshot of `version` has it.  Replied to when it is sent."""

    group: str
    version: int
    bucket: int
    timeout_s: float


class DropGroup(Message):
    """Give a group up, also in the middle of a broadcast."""

    group: str


class WriteStage(Message):
    """Write this stage's files of an export of `version` into a folder that all stages see."""

    partial: str
    version: int
    timeout_s: float


# Driver -> coordinator ------------------------------------------------------------------------------------------------


class StartEvaluation(Message):
    """Issue `seeds` episodes a task in the eval lane: before any train episode, or (beside) while those go on.  One that is not
    beside ends those that are."""

    name: str
    tasks: list[Task]
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seeds: int = 1
    beside: bool = False


class EvaluationProgress(Message):
    name: str


class Tally(msgspec.Struct, array_like=True):
    """Episodes of an evaluation that ended; the last four, for intervals, are of tasks of which all did: s successes and r
    episodes with a result each."""

    successes: int = 0
    results: int = 0
    """Episodes with a result."""
    episodes: int = 0
    tasks: int = 0
    """With r > 0."""
    ss: int = 0
    """Σ s²."""
    sr: int = 0
    """Σ s·r."""
    rr: int = 0
    """Σ r²."""


class EvaluationState(Message):
    """How far an evaluation is."""

    name: str
    total: int
    """Episodes asked for: tasks × seeds."""
    seeds: int
    beside: bool = False
    all: Tally = msgspec.field(default_factory=Tally)
    by_level: dict[int, Tally] = {}
    """By difficulty."""
    by_task: dict[str, Tally] = {}
    """By the task's name; told once it is over."""
    by_seed: list[Tally] = []
    reasons: dict[str, int] = {}
    """Why episodes ended, as trajectories say it."""
    blocked: int = 0
    """Episodes without a result because of their site: blocked, page_timeout, page_error."""
    faults: int = 0
    """Episodes without a result because retries were exhausted."""
    steps: dict[bool, list[int]] = {}
    """Whether it succeeded -> [episodes with a result, their steps, their response tokens]."""
    min_version: int = -1
    """Of the policies that sampled its episodes."""
    max_version: int = -1
    dropped: bool = False
    """It was ended before it was over."""

    @property
    def successes(self) -> int:
        return self.all.successes

    @property
    def finished(self) -> int:
        return self.all.episodes

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.dropped or self.finished >= self.total


class BeginTraining(Message):
    """Begin train groups; the minutes of the RL phase count from here."""


class GetStatus(Message):
    pass


class Status(Message):
    """What the live display shows, and the account of invariant 1."""

    step: int
    version: int
    finished: bool
    """TrainingFinished was said, or (rollout_only) the last batch is collected."""
    minutes: float
    """Since BeginTraining; 0 before it."""
    running: int
    """Episodes in slots, both lanes."""
    running_groups: int
    queued_groups: int
    in_training_groups: int
    account: Account
    success: float
    """Of the newest 256 train episodes; NaN without any."""
    mixed_share: float
    """Of the newest 64 complete groups, those whose rewards differ."""
    trajectories: int
    """Train episodes that ended with success or failure."""
    lag_mean: float
    """Over all trained response tokens."""
    lag_max: int
    workers: int
    """Heard of within the lease."""
    engines: list[EngineStatus]
    metrics: dict[str, float]
    """Of the newest train step."""
    queue_bytes: int
    """Payloads of finished trajectories on disk, which are not finally trained yet."""
    store_bytes: int
    """Screenshots on disk."""


class Account(msgspec.Struct, gc=False):
    """Attempts of the train lane: issued = trained + Σ dropped + in_flight, at every moment."""

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int


class EndRun(Message):
    """Stop issuing, turn what is in flight into `run_ended`; the reply is the final Status."""


# Anyone -> screenshot store -------------------------------------------------------------------------------------------


class LackingImages(Message):
    """Which of these are not in the store?  Changes nothing."""

    digests: list[str]


class Lacking(Message):
    digests: list[str]


class ClaimImages(Message):
    """`owner`, an attempt, refers to all of these from now on, whether they are there already or are still to be put: the
    reply names those that are lacking.  What is there stays until the last owner is released.  Repeats change nothing."""

    owner: AttemptKey
    digests: list[str]


class PutImages(Message):
    """Encoded bytes of images that `owner` claimed; others are refused.  Waits for room."""

    owner: AttemptKey
    images: dict[str, bytes]


class GetImages(Message):
    digests: list[str]


class Images(Message):
    images: dict[str, bytes]
    missing: list[str]


class ReleaseImages(Message):
    """These owners refer to nothing any more; what no other refers to goes.  Unknown ones are ignored."""

    owners: list[AttemptKey]


class KeepImages(Message):
    """The only owners that there are: all others that claimed longer than `older_than_s` ago are released (their release
    was lost, or they claimed after it)."""

    owners: list[AttemptKey]
    older_than_s: float


class StoreStatus(Message):
    pass


class StoreState(Message):
    images: int
    bytes: int
    """On disk, encoded."""
    limit_bytes: int
    owners: int
    waiting: int
    """Uploads that wait for room."""


AnyMessage = (
    Done | Refused | Failed
    | GetAssignments | Assignments | SubmitTrajectory | Submitted
    | Take | Manifest | FetchGroups | Groups | ListUpcoming | Upcoming | StepTrained | TrainingFinished
    | CheckpointDurable | TrainerStarted | ClaimVersion | Version
    | ListEngines | Engines | EngineStatus
    | Generate | NeedImages | PollGeneration | CancelGeneration | Generating | Generated | EngineUnavailable | Drain
    | JoinWeightGroup | LeaveWeightGroup | BeginRefresh | LoadBucket | GiveUpBroadcast | EndRefresh
    | Checksum | ChecksumValue | LoadFromDisk
    | OpenRendezvous | Rendezvous | StandGroup | SendBucket | DropGroup | WriteStage
    | StartEvaluation | EvaluationProgress | EvaluationState | BeginTraining | GetStatus | Status | EndRun
    | LackingImages | Lacking | ClaimImages | PutImages | GetImages | Images | ReleaseImages | KeepImages
    | StoreStatus | StoreState
)  # fmt: skip
