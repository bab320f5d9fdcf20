//! All metrics of the gateway: one table declares and registers each, with a typed handle.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::exposition::Exposition;
use super::labels::*;
use super::{process, procfs};

type Seconds = Gauge<f64, AtomicU64>;

/// One line for each metric: its handle, its type, its name without the prefix, and its help.
macro_rules! metrics {
    ($($field:ident: $kind:ty $(= $made:expr)? => $name:literal, $help:literal;)*) => {
        /// The process's metrics. One value, shared by reference.
        pub struct Metrics {
            registry: Registry,
            $($field: $kind,)*
        }

        impl Metrics {
            fn registered() -> Self {
                let mut registry = Registry::default();
                procfs::register(&mut registry);
                let ours = registry.sub_registry_with_prefix("oncegate");
                process::register(ours);
                $(
                    let $field: $kind = metrics!(@made $($made)?);
                    ours.register($name, $help, $field.clone());
                )*
                Self { registry, $($field,)* }
            }
        }
    };
    (@made) => { Default::default() };
    (@made $made:expr) => { $made };
}

metrics! {
    requests: Family<ByOperation, Counter> => "requests", "Requests by operation and by how they were answered";
    request_durations: Family<ByOperation, Histogram> = Family::new_with_constructor(durations) => "request_duration_seconds", "Time from a request's head to the begin of its answer, by operation and by how it was answered";
    observed: Family<ByWould, Counter> => "observed", "Requests that were only observed, by operation and by what would have become of them";
    steps: Family<ByStep, Histogram> = Family::new_with_constructor(durations) => "step_seconds", "Time taken by each step of a request";
    in_flight: Gauge => "in_flight", "Reserved requests that are being worked on";
    waiting: Gauge => "waiting", "Duplicates that wait for an execution";
    settling: Gauge => "settling", "Outcomes that the database has not taken yet";
    lookups: Family<ByAsked, Counter> => "lookups", "Questions about unknown outcomes by operation and result";
    late_reads: Gauge => "late_reads", "Answers awaited after their time-out";
    late_answers: Family<ByLateAnswer, Counter> => "late_answers", "What came of answers awaited after their time-out";
    late_outcomes: Counter => "late_outcomes", "Outcomes whose record had gone on, kept in the audit table";
    store_went_back: Family<ByWentBack, Counter> => "store_went_back", "What the database had confirmed and did not know any more, by what became of it";
    event_errors: Counter => "event_errors", "Events whose template failed";
    unknown_records: Gauge => "unknown_records", "Records whose outcome is unknown";
    swept: Family<BySwept, Counter> => "swept", "Rows deleted after their retention";
    sweep_behind: Seconds => "sweep_behind_seconds", "For how long the sweeper has had more to delete than it got to; 0: it keeps up";
    cached_bytes: Gauge => "replay_cache_bytes", "Size of the answers held in memory for replay";

    deliveries: Family<ByDelivery, Counter> => "deliveries", "Delivery attempts by sink and result";
    delivery_durations: Family<BySink, Histogram> = Family::new_with_constructor(durations) => "delivery_duration_seconds", "Time from the begin of a delivery to the sink's answer, or to its failure";
    pending: Family<BySink, Gauge> => "outbox_pending", "Pending events of a sink";
    outbox_refused: Counter => "outbox_refused", "Reservations refused because too many events are pending";
    oldest: Family<BySink, Seconds> => "outbox_oldest_age_seconds", "Age of the oldest pending event of a sink";
    dead: Family<BySink, Gauge> => "outbox_dead", "Events given up for a sink";
    sink_clock: Family<BySink, Gauge> => "sink_clock_ahead_seconds", "By how much a sink's clock is ahead of ours, by its last answer with a date";
    blocked_keys: Family<BySink, Gauge> => "outbox_blocked_keys", "Ordering keys whose events wait behind a dead one";
    sink_paused: Family<ByPause, Gauge> => "sink_paused", "Whether a sink is paused, by the reason";
    sink_failures: Family<BySink, Gauge> => "sink_failures", "Deliveries to a sink that failed in a row, as this process saw them";
    sink_probes: Family<ByProbe, Counter> => "sink_probes", "Probes of paused sinks by sink and result";
    sink_in_flight: Family<BySink, Gauge> => "sink_in_flight", "Deliveries under way to a sink";

    spill_entries: Gauge => "spill_entries", "Outcomes in the spill that the database has not taken yet";
    spill_bytes: Gauge => "spill_bytes", "Size of the outcomes in the spill";
    spill_drained: Family<ByDrained, Counter> => "spill_drained", "Outcomes that left the spill, by what became of them";
    spill_turned_away: Counter => "spill_turned_away", "Outcomes that the spill did not take: they are kept in memory alone";
    spill_refused: Counter => "spill_refused", "Reservations refused because the spill is full or cannot be written";
    spill_left_files: Gauge => "spill_left_files", "Spill files that were left alone: of another database, of a newer format, or damaged";

    tunnels_open: Gauge => "tunnels_open", "Connections that are tunnels after a switch of protocols";
    tunnels: Family<ByTunnelEnd, Counter> => "tunnels", "Tunnels that have ended, by how they did";
    tunnel_bytes: Family<ByWay, Counter> => "tunnel_bytes", "Bytes that came into tunnels, by which way they pass";
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self::registered();
        // Shown from the start: an alert on a series that is absent never fires.
        for result in WentBack::ALL {
            drop(metrics.store_went_back.get_or_create(&ByWentBack { result: *result }));
        }
        metrics
    }
}

/// Buckets from half a millisecond to half a minute.
fn durations() -> Histogram {
    Histogram::new([
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    ])
}

impl Metrics {
    /// A request took this long until its answer began.
    pub fn request_took(&self, operation: &str, reply: Reply, time: Duration) {
        let by = ByOperation { operation: operation.to_owned(), reply };
        self.request_durations.get_or_create(&by).observe(time.as_secs_f64());
    }

    /// Requests of an operation are to come: how they are answered is shown from here on.
    pub fn serves(&self, operation: &str) {
        for reply in Reply::ALL {
            let by = ByOperation { operation: operation.to_owned(), reply: *reply };
            drop(self.requests.get_or_create(&by));
        }
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

    /// Counts a waiting duplicate until the guard is dropped.
    #[must_use]
    pub fn waiting(&self) -> GaugeGuard {
        GaugeGuard::raise(&self.waiting)
    }

    /// Counts an outcome that the retrier holds until the guard is dropped.
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

    /// The result of an answer that was awaited after its time-out.
    pub fn late_answer(&self, result: LateAnswer) {
        self.late_answers.get_or_create(&ByLateAnswer { result }).inc();
    }

    /// An outcome came after its record had changed.
    pub fn late_outcome(&self) {
        self.late_outcomes.inc();
    }

    /// The database lost a commit that it had confirmed.
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

    /// A delivery to a sink took this long, however it ended.
    pub fn delivery_took(&self, sink: &str, time: Duration) {
        let by = BySink { sink: sink.to_owned() };
        self.delivery_durations.get_or_create(&by).observe(time.as_secs_f64());
    }

    /// Whether a sink is paused now for this reason.
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

    /// The pending events of a sink now.
    pub fn outbox(&self, sink: &str, pending: u64, oldest: Duration, dead: u64) {
        let by = BySink { sink: sink.to_owned() };
        self.pending.get_or_create(&by).set(clamp(pending));
        self.oldest.get_or_create(&by).set(oldest.as_secs_f64());
        self.dead.get_or_create(&by).set(clamp(dead));
    }

    /// A reservation was refused because too many events are pending.
    pub fn outbox_refused(&self) {
        self.outbox_refused.inc();
    }

    /// The offset of a sink's clock, from the time in its answer.
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

    /// The content of the spill now.
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

    /// A reservation was refused because the spill is full or cannot be written.
    pub fn spill_refused(&self) {
        self.spill_refused.inc();
    }

    /// How many spill files were left alone at the start.
    pub fn spill_left_files(&self, count: u64) {
        self.spill_left_files.set(clamp(count));
    }

    /// All metrics, as text.
    #[must_use]
    pub fn render(&self, exposition: Exposition) -> String {
        let mut page = String::new();
        let written = match exposition {
            Exposition::OpenMetrics => text::encode(&mut page, &self.registry),
            Exposition::Prometheus => prometheus_text::encode(&mut page, &self.registry),
        };
        // Writing to a String does not fail. If it did, the page would be empty, and the scraper would notice.
        if written.is_err() {
            page.clear();
        }
        page
    }
}

fn clamp(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Raises a gauge by one until it is dropped.
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
