//! Every metric by name, as typed handles, and how an error is written down. Nobody else names a metric.
//!
//! Labels come from the configuration (operations, sinks) or from enums here, never from callers: cardinality is bounded.

pub mod log;
pub mod pace;

use std::fmt::Write as _;
use std::sync::LazyLock;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

macro_rules! label_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$vdoc])* $variant,)*
        }

        impl $name {
            /// The label's value.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
                encoder.write_str(self.as_str())
            }
        }
    };
}

label_enum!(
    /// How a request was answered.
    Reply {
        /// Forwarded, and its answer kept.
        Executed = "executed",
        /// Answered from the store.
        Replayed = "replayed",
        /// Waited for another's execution and got its answer.
        Waited = "waited",
        /// Forwarded, and known not to have executed: the key is free again.
        Released = "released",
        /// Forwarded, and nobody knows whether it executed.
        Unknown = "unknown",
        /// Refused: another request under a used key.
        Mismatch = "mismatch",
        /// Refused: still running after the wait.
        InProgress = "in_progress",
        /// Refused: the stored answer is not for this caller.
        Forbidden = "forbidden",
        /// Refused: nobody could say who asks, or whether the stored answer is for this caller.
        Unchecked = "unchecked",
        /// Refused: a record whose outcome is unknown.
        Held = "held",
        /// Refused: executed, its answer was too large to keep.
        NotRetained = "not_retained",
        /// Refused: executed, its answer is kept in a coding that the caller does not accept.
        NotAcceptable = "not_acceptable",
        /// Refused: key, tenant or request not valid.
        Invalid = "invalid",
        /// Refused: a limit is reached.
        Overloaded = "overloaded",
        /// Not sent, because of a mistake of the gateway.
        Failed = "failed",
        /// Refused: no reservation could be made.
        StoreUnavailable = "store_unavailable",
        /// Passed through unprotected.
        Passed = "passed",
        /// Forwarded unprotected, because the store was away.
        Bypassed = "bypassed",
    }
);

label_enum!(
    /// Why a log line was lost.
    Loss {
        /// Too many waited to be written.
        QueueFull = "queue_full",
        /// Standard error took no bytes.
        WriteFailed = "write_failed",
    }
);

label_enum!(
    /// What would have become of a request that was only observed.
    Would {
        /// The first under its key: executed.
        Execute = "execute",
        /// Passed through: it has no key, and need not.
        Pass = "pass",
        /// Answered with the stored answer.
        Replay = "replay",
        /// Kept waiting for the first request under its key.
        Wait = "wait",
        /// Refused: another request under a used key.
        Mismatch = "mismatch",
        /// Refused: what the first one came to is not for this caller.
        Forbidden = "forbidden",
        /// Refused: the first one's outcome is unknown.
        Hold = "hold",
        /// Refused: the first one's answer is too large to keep.
        NotRetained = "not_retained",
        /// Refused: it has no key.
        KeyMissing = "key_missing",
        /// Refused: its key is not valid.
        KeyInvalid = "key_invalid",
        /// Refused: nobody knows whose it is.
        TenantMissing = "tenant_missing",
        /// Refused: its body is too large.
        BodyTooLarge = "body_too_large",
        /// Refused: a limit is reached.
        Overloaded = "overloaded",
        /// Refused for another reason, which the log tells.
        Refuse = "refuse",
        /// Not known: its body did not come to its end.
        Unjudged = "unjudged",
    }
);

label_enum!(
    /// The timed steps of a request.
    Step {
        /// Canonical form and hashes.
        Fingerprint = "fingerprint",
        /// The reservation's commit.
        Reserve = "reserve",
        /// The upstream.
        Forward = "forward",
        /// The completion's commit.
        Complete = "complete",
    }
);

label_enum!(
    /// What came of an exchange after its time-out.
    LateAnswer {
        /// An answer, kept: the record is completed.
        Completed = "completed",
        /// An answer that says that it did not execute.
        Released = "released",
        /// An answer that leaves the outcome unknown.
        Unknown = "unknown",
        /// An answer that the store has not taken yet, or whose record had gone on.
        NotStored = "not_stored",
        /// No answer: the time was over, the connection broke, or the process ended.
        Missed = "missed",
        /// Not awaited: too many others were.
        NoRoom = "no_room",
    }
);

label_enum!(
    /// How a delivery ended.
    Delivery {
        /// Taken by the sink.
        Sent = "sent",
        /// Failed, tried again later.
        Failed = "failed",
        /// Refused by the sink (400, 413, 415, 422), tried again later.
        Refused = "refused",
        /// Not the event's fault, no attempt used: the sink is gone, busy or down, or the payload does not open here.
        Returned = "returned",
        /// Failed for good.
        Dead = "dead",
        /// Its claim had ended when the verdict came.
        LostClaim = "lost_claim",
    }
);

label_enum!(
    /// What came of a probe of a paused sink.
    Probe {
        /// The sink answers: it is resumed.
        Well = "well",
        /// It does not, or not yet.
        Failed = "failed",
        /// It says that it is gone.
        Gone = "gone",
        /// There was nothing to send.
        Idle = "idle",
    }
);

label_enum!(
    /// What came of a question about an unknown outcome.
    LookupEnd {
        /// It had been executed.
        Found = "found",
        /// It had not.
        NotFound = "not_found",
        /// The upstream did not say.
        Failed = "failed",
    }
);

label_enum!(
    /// How a tunnel ended.
    TunnelEnd {
        /// Both sides closed it.
        Closed = "closed",
        /// One of its connections broke.
        Failed = "failed",
        /// Nothing passed for too long.
        Idle = "idle",
        /// This process stops.
        Shutdown = "shutdown",
    }
);

label_enum!(
    /// Which way bytes pass through a tunnel.
    Way {
        /// From the caller to the API.
        ToApi = "to_api",
        /// From the API to the caller.
        ToCaller = "to_caller",
    }
);

label_enum!(
    /// What the sweeper deletes.
    Swept {
        /// Expired records.
        Records = "records",
        /// Delivered events past their retention.
        Events = "events",
    }
);

label_enum!(
    /// What became of an outcome that was in the spill.
    Drained {
        /// The database took it.
        Completed = "completed",
        /// The database took it: the attempt had not executed, and its key is free, or its record unknown as before it.
        Released = "released",
        /// The database had it already.
        Already = "already",
        /// Somebody else has the record.
        FencedOff = "fenced_off",
        /// The database refuses it, for good.
        Refused = "refused",
    }
);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByDrained {
    result: Drained,
}

label_enum!(
    /// What became of something that the database had confirmed and did not know any more.
    WentBack {
        /// A reservation of an attempt that was under way: written back.
        Reservation = "reservation",
        /// A completion whose record was still there: completed again.
        CompletedAgain = "completed_again",
        /// A completion without its record: both written back.
        WrittenBack = "written_back",
        /// An attempt whose answer is not at hand: its record is unknown.
        Unknown = "unknown",
        /// Another record stands under its scope by now: what it came to is in the audit table.
        Overtaken = "overtaken",
    }
);

impl WentBack {
    const ALL: [Self; 5] = [
        Self::Reservation,
        Self::CompletedAgain,
        Self::WrittenBack,
        Self::Unknown,
        Self::Overtaken,
    ];
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWentBack {
    result: WentBack,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOperation {
    operation: String,
    reply: Reply,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWould {
    operation: String,
    would: Would,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByAsked {
    operation: String,
    result: LookupEnd,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByStep {
    step: Step,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySink {
    sink: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByDelivery {
    sink: String,
    result: Delivery,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByPause {
    sink: String,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByProbe {
    sink: String,
    result: Probe,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByLateAnswer {
    result: LateAnswer,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTunnelEnd {
    end: TunnelEnd,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWay {
    way: Way,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySwept {
    what: Swept,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByLoss {
    reason: Loss,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTask {
    task: &'static str,
}

/// For every registry: a process has one set of background tasks.
static TASK_ENDS: LazyLock<Family<ByTask, Counter>> = LazyLock::new(Family::default);

/// A background task ended though it was not told to.
pub fn task_ended(task: &'static str) {
    TASK_ENDS.get_or_create(&ByTask { task }).inc();
}

type Seconds = Gauge<f64, AtomicU64>;

/// The process's metrics. One value, shared by reference.
pub struct Metrics {
    registry: Registry,
    requests: Family<ByOperation, Counter>,
    observed: Family<ByWould, Counter>,
    steps: Family<ByStep, Histogram>,
    in_flight: Gauge,
    waiting: Gauge,
    settling: Gauge,
    lookups: Family<ByAsked, Counter>,
    late_reads: Gauge,
    tunnels_open: Gauge,
    tunnels: Family<ByTunnelEnd, Counter>,
    tunnel_bytes: Family<ByWay, Counter>,
    late_answers: Family<ByLateAnswer, Counter>,
    late_outcomes: Counter,
    store_went_back: Family<ByWentBack, Counter>,
    event_errors: Counter,
    deliveries: Family<ByDelivery, Counter>,
    sink_paused: Family<ByPause, Gauge>,
    sink_failures: Family<BySink, Gauge>,
    sink_probes: Family<ByProbe, Counter>,
    sink_in_flight: Family<BySink, Gauge>,
    pending: Family<BySink, Gauge>,
    outbox_refused: Counter,
    oldest: Family<BySink, Seconds>,
    dead: Family<BySink, Gauge>,
    sink_clock: Family<BySink, Gauge>,
    blocked_keys: Family<BySink, Gauge>,
    unknown_records: Gauge,
    swept: Family<BySwept, Counter>,
    sweep_behind: Seconds,
    cached_bytes: Gauge,
    spill_entries: Gauge,
    spill_bytes: Gauge,
    spill_drained: Family<ByDrained, Counter>,
    spill_turned_away: Counter,
    spill_refused: Counter,
    spill_left_files: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("oncegate"),
            requests: Family::default(),
            observed: Family::default(),
            steps: Family::new_with_constructor(step_histogram),
            in_flight: Gauge::default(),
            waiting: Gauge::default(),
            settling: Gauge::default(),
            lookups: Family::default(),
            late_reads: Gauge::default(),
            tunnels_open: Gauge::default(),
            tunnels: Family::default(),
            tunnel_bytes: Family::default(),
            late_answers: Family::default(),
            late_outcomes: Counter::default(),
            store_went_back: Family::default(),
            event_errors: Counter::default(),
            deliveries: Family::default(),
            sink_paused: Family::default(),
            sink_failures: Family::default(),
            sink_probes: Family::default(),
            sink_in_flight: Family::default(),
            pending: Family::default(),
            outbox_refused: Counter::default(),
            oldest: Family::default(),
            dead: Family::default(),
            sink_clock: Family::default(),
            blocked_keys: Family::default(),
            unknown_records: Gauge::default(),
            swept: Family::default(),
            sweep_behind: Seconds::default(),
            cached_bytes: Gauge::default(),
            spill_entries: Gauge::default(),
            spill_bytes: Gauge::default(),
            spill_drained: Family::default(),
            spill_turned_away: Counter::default(),
            spill_refused: Counter::default(),
            spill_left_files: Gauge::default(),
        };
        metrics.register();
        metrics
    }
}

/// From half a millisecond to half a minute.
fn step_histogram() -> Histogram {
    Histogram::new([
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    ])
}

impl Metrics {
    fn register(&mut self) {
        let r = &mut self.registry;
        r.register(
            "requests",
            "Requests by operation and by how they were answered",
            self.requests.clone(),
        );
        r.register(
            "observed",
            "Requests that were only observed, by operation and by what would have become of them",
            self.observed.clone(),
        );
        r.register("step_seconds", "Time taken by each step of a request", self.steps.clone());
        r.register(
            "in_flight",
            "Reserved requests that are being worked on",
            self.in_flight.clone(),
        );
        r.register("waiting", "Duplicates that wait for an execution", self.waiting.clone());
        r.register(
            "settling",
            "Outcomes that the database has not taken yet",
            self.settling.clone(),
        );
        r.register(
            "lookups",
            "Questions about unknown outcomes by operation and result",
            self.lookups.clone(),
        );
        r.register("late_reads", "Answers awaited after their time-out", self.late_reads.clone());
        r.register(
            "late_answers",
            "What came of answers awaited after their time-out",
            self.late_answers.clone(),
        );
        r.register(
            "late_outcomes",
            "Outcomes whose record had gone on, kept in the audit table",
            self.late_outcomes.clone(),
        );
        r.register(
            "store_went_back",
            "What the database had confirmed and did not know any more, by what became of it",
            self.store_went_back.clone(),
        );
        // Shown from the start: an alert on a series that is absent never fires.
        for result in WentBack::ALL {
            drop(self.store_went_back.get_or_create(&ByWentBack { result }));
        }
        r.register("event_errors", "Events whose template failed", self.event_errors.clone());
        r.register(
            "unknown_records",
            "Records whose outcome is unknown",
            self.unknown_records.clone(),
        );
        r.register("swept", "Rows deleted after their retention", self.swept.clone());
        r.register(
            "sweep_behind_seconds",
            "For how long the sweeper has had more to delete than it got to; 0: it keeps up",
            self.sweep_behind.clone(),
        );
        r.register(
            "replay_cache_bytes",
            "Size of the answers held in memory for replay",
            self.cached_bytes.clone(),
        );
        self.register_sinks();
        self.register_spill();
        self.register_tunnels();
        self.register_process();
    }

    /// What a process counts once, whoever counts it.
    fn register_process(&mut self) {
        let r = &mut self.registry;
        r.register(
            "log_lines_lost",
            "Log lines that could not be written, by the reason",
            log::LOST.clone(),
        );
        r.register(
            "panics",
            "Panics of this process; each is a mistake of the program",
            log::PANICS.clone(),
        );
        r.register(
            "task_ends",
            "Background tasks that ended though they were not told to, by the task",
            TASK_ENDS.clone(),
        );
    }

    fn register_sinks(&mut self) {
        let r = &mut self.registry;
        r.register("deliveries", "Delivery attempts by sink and result", self.deliveries.clone());
        r.register("outbox_pending", "Events owed to a sink", self.pending.clone());
        r.register(
            "outbox_refused",
            "Reservations refused because too many events are owed",
            self.outbox_refused.clone(),
        );
        r.register(
            "outbox_oldest_age_seconds",
            "Age of the oldest event owed to a sink",
            self.oldest.clone(),
        );
        r.register("outbox_dead", "Events given up for a sink", self.dead.clone());
        r.register(
            "sink_clock_ahead_seconds",
            "By how much a sink's clock is ahead of ours, by its last answer with a date",
            self.sink_clock.clone(),
        );
        r.register(
            "outbox_blocked_keys",
            "Ordering keys whose events wait behind a dead one",
            self.blocked_keys.clone(),
        );
        r.register(
            "sink_paused",
            "Whether a sink is paused, by the reason",
            self.sink_paused.clone(),
        );
        r.register(
            "sink_failures",
            "Deliveries to a sink that failed in a row, as this process saw them",
            self.sink_failures.clone(),
        );
        r.register(
            "sink_probes",
            "Probes of paused sinks by sink and result",
            self.sink_probes.clone(),
        );
        r.register("sink_in_flight", "Deliveries under way to a sink", self.sink_in_flight.clone());
    }

    fn register_tunnels(&mut self) {
        let r = &mut self.registry;
        r.register(
            "tunnels_open",
            "Connections that are tunnels after a switch of protocols",
            self.tunnels_open.clone(),
        );
        r.register("tunnels", "Tunnels that have ended, by how they did", self.tunnels.clone());
        r.register(
            "tunnel_bytes",
            "Bytes that came into tunnels, by which way they pass",
            self.tunnel_bytes.clone(),
        );
    }

    fn register_spill(&mut self) {
        let r = &mut self.registry;
        r.register(
            "spill_entries",
            "Outcomes in the spill that the database has not taken yet",
            self.spill_entries.clone(),
        );
        r.register("spill_bytes", "Size of the outcomes in the spill", self.spill_bytes.clone());
        r.register(
            "spill_drained",
            "Outcomes that left the spill, by what became of them",
            self.spill_drained.clone(),
        );
        r.register(
            "spill_turned_away",
            "Outcomes that the spill did not take: they are owed from memory alone",
            self.spill_turned_away.clone(),
        );
        r.register(
            "spill_refused",
            "Reservations refused because the spill is full",
            self.spill_refused.clone(),
        );
        r.register(
            "spill_left_files",
            "Spill files that were left alone: of another database, of a newer format, or damaged",
            self.spill_left_files.clone(),
        );
    }

    /// One more request was answered.
    pub fn replied(&self, operation: &str, reply: Reply) {
        self.requests.get_or_create(&ByOperation { operation: operation.to_owned(), reply }).inc();
    }

    /// One more request was observed.
    pub fn observed(&self, operation: &str, would: Would) {
        self.observed.get_or_create(&ByWould { operation: operation.to_owned(), would }).inc();
    }

    /// A step took this long.
    pub fn took(&self, step: Step, time: Duration) {
        self.steps.get_or_create(&ByStep { step }).observe(time.as_secs_f64());
    }

    /// Counts a reserved request as in flight until the guard is dropped.
    #[must_use]
    pub fn in_flight(&self) -> GaugeGuard {
        GaugeGuard::raise(&self.in_flight)
    }

    /// How many reserved requests are in flight.
    #[must_use]
    pub fn in_flight_now(&self) -> i64 {
        self.in_flight.get()
    }

    /// Counts a waiting duplicate until the guard is dropped.
    #[must_use]
    pub fn waiting(&self) -> GaugeGuard {
        GaugeGuard::raise(&self.waiting)
    }

    /// Counts an outcome that the settler holds until the guard is dropped.
    #[must_use]
    pub fn settling(&self) -> GaugeGuard {
        GaugeGuard::raise(&self.settling)
    }

    /// The upstream was asked what became of an attempt.
    pub fn asked(&self, operation: &str, result: LookupEnd) {
        self.lookups.get_or_create(&ByAsked { operation: operation.to_owned(), result }).inc();
    }

    /// Counts an answer that is awaited after its time-out until the guard is dropped.
    #[must_use]
    pub fn late_read(&self) -> GaugeGuard {
        GaugeGuard::raise(&self.late_reads)
    }

    /// Counts a tunnel as open until the guard is dropped.
    #[must_use]
    pub fn tunnel(&self) -> GaugeGuard {
        GaugeGuard::raise(&self.tunnels_open)
    }

    /// So many bytes came into a tunnel.
    pub fn tunnelled(&self, way: Way, bytes: u64) {
        self.tunnel_bytes.get_or_create(&ByWay { way }).inc_by(bytes);
    }

    /// A tunnel has ended.
    pub fn tunnel_ended(&self, end: TunnelEnd) {
        self.tunnels.get_or_create(&ByTunnelEnd { end }).inc();
    }

    /// What came of an answer that was awaited after its time-out.
    pub fn late_answer(&self, result: LateAnswer) {
        self.late_answers.get_or_create(&ByLateAnswer { result }).inc();
    }

    /// An outcome found its record gone on.
    pub fn late_outcome(&self) {
        self.late_outcomes.inc();
    }

    /// The database had forgotten something that it had confirmed.
    pub fn store_went_back(&self, result: WentBack) {
        self.store_went_back.get_or_create(&ByWentBack { result }).inc();
    }

    /// Templates of events failed.
    pub fn event_errors(&self, count: u64) {
        self.event_errors.inc_by(count);
    }

    /// A delivery ended.
    pub fn delivered(&self, sink: &str, result: Delivery) {
        self.deliveries.get_or_create(&ByDelivery { sink: sink.to_owned(), result }).inc();
    }

    /// Whether a sink is paused now, for one reason of all that there are.
    pub fn sink_paused(&self, sink: &str, reason: &'static str, paused: bool) {
        let by = ByPause { sink: sink.to_owned(), reason };
        self.sink_paused.get_or_create(&by).set(i64::from(paused));
    }

    /// How many deliveries to a sink have failed in a row.
    pub fn sink_failures(&self, sink: &str, failures: u32) {
        let by = BySink { sink: sink.to_owned() };
        self.sink_failures.get_or_create(&by).set(i64::from(failures));
    }

    /// A paused sink was probed.
    pub fn sink_probed(&self, sink: &str, result: Probe) {
        self.sink_probes.get_or_create(&ByProbe { sink: sink.to_owned(), result }).inc();
    }

    /// Counts a delivery as under way until the guard is dropped.
    #[must_use]
    pub fn delivering(&self, sink: &str) -> GaugeGuard {
        GaugeGuard::raise(&self.sink_in_flight.get_or_create(&BySink { sink: sink.to_owned() }))
    }

    /// What the outbox owes to a sink now.
    pub fn outbox(&self, sink: &str, pending: u64, oldest: Duration, dead: u64) {
        let by = BySink { sink: sink.to_owned() };
        self.pending.get_or_create(&by).set(clamp(pending));
        self.oldest.get_or_create(&by).set(oldest.as_secs_f64());
        self.dead.get_or_create(&by).set(clamp(dead));
    }

    /// A reservation was refused because too many events are owed.
    pub fn outbox_refused(&self) {
        self.outbox_refused.inc();
    }

    /// A sink told its time.
    pub fn sink_clock(&self, sink: &str, ahead_seconds: i64) {
        let by = BySink { sink: sink.to_owned() };
        self.sink_clock.get_or_create(&by).set(ahead_seconds);
    }

    /// How many ordering keys of a sink wait behind a dead event now.
    pub fn blocked_keys(&self, sink: &str, keys: u64) {
        self.blocked_keys.get_or_create(&BySink { sink: sink.to_owned() }).set(clamp(keys));
    }

    /// How many records are unknown now.
    pub fn unknown_records(&self, count: u64) {
        self.unknown_records.set(clamp(count));
    }

    /// Rows were swept.
    pub fn swept(&self, what: Swept, rows: u64) {
        self.swept.get_or_create(&BySwept { what }).inc_by(rows);
    }

    /// For how long there has been more to sweep than was swept in a round.
    pub fn sweep_behind(&self, time: Duration) {
        self.sweep_behind.set(time.as_secs_f64());
    }

    /// The replay cache's size now.
    pub fn cached_bytes(&self, bytes: u64) {
        self.cached_bytes.set(clamp(bytes));
    }

    /// What the spill holds now.
    pub fn spill(&self, entries: u64, bytes: u64) {
        self.spill_entries.set(clamp(entries));
        self.spill_bytes.set(clamp(bytes));
    }

    /// An outcome left the spill.
    pub fn spill_drained(&self, result: Drained) {
        self.spill_drained.get_or_create(&ByDrained { result }).inc();
    }

    /// The spill did not take an outcome.
    pub fn spill_turned_away(&self) {
        self.spill_turned_away.inc();
    }

    /// A reservation was refused because the spill is full.
    pub fn spill_refused(&self) {
        self.spill_refused.inc();
    }

    /// How many spill files were left alone at the start.
    pub fn spill_left_files(&self, count: u64) {
        self.spill_left_files.set(clamp(count));
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail; were it to, the page would be cut, which a scraper notices.
        if encode(&mut text, &self.registry).is_err() {
            text.clear();
        }
        text
    }
}

fn clamp(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Keeps a gauge raised by one.
#[derive(Debug)]
pub struct GaugeGuard(Gauge);

impl GaugeGuard {
    fn raise(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// An error with its causes, outermost first and each once, for one line of a log or of a message.
#[must_use]
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // A transparent error says the same as its cause.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
