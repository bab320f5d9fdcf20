//! Delivers the outbox: for each sink a loop that claims what is due, sends it, and writes how it ended.
//!
//! ```text
//! nudge, timer -> claim (never more than free slots) -> deliver, concurrently -> verdict -> acknowledge, in batches
//!                 ^                                                             |
//!                 +-- not while the sink is paused: then one probe at a time <--+
//! ```
//!
//! This file starts and supervises: a [`worker`] for each sink, begun anew when it panics, and one reader of the sinks'
//! [`status`] for all of them. What must stay true:
//!
//! - The table says what is pending; a nudge only makes a worker look sooner.
//! - Sinks share nothing: one that is slow or down, or a worker that panics, does not hold up another.
//! - Whether a sink is paused stands in the database ([`status`]); a paused one is sent nothing but probes ([`probe`]).
//! - A verdict that the database does not take is repeated until its claim is over, then forgotten ([`acknowledge`]): the
//!   event is delivered again under its id by whoever claims it next. It is never sent again from here.
//!
//! A process that dies here leaves claims that run out, and that others may take as soon as its lease has ended.

mod acknowledge;
pub mod address;
mod claimant;
mod pauses;
mod probe;
pub mod sink;
mod slots;
mod status;
pub mod verdict;
mod worker;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::claimant::Claimant;
use self::sink::Sink;
use self::status::{StatusReader, StatusWatch};
use self::worker::{SinkWorker, slots_of};
use crate::store::Deliveries;
use crate::tasks::{self, Loop};
use crate::telemetry::Metrics;

/// Bounds of the pause between two looks.
const POLL_MIN: Duration = Duration::from_millis(10);
const POLL_MAX: Duration = Duration::from_secs(60);

/// How the sinks stand is read this many times less often than events are looked for.
const READ_FACTOR: u32 = 5;

/// What the relay delivers to, and how often it looks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The sinks, each with a name of its own.
    pub sinks: Vec<sink::Settings>,
    /// Pause between two looks while events come in (100 ms, say); grows to 8 times as much while none do.
    pub poll: Duration,
}

/// Delivers until `stop`, then gives back what is not sent, waits for what is in flight (each bounded by its sink's
/// time-out), writes the verdicts and ends. Dropping the future cuts that short: claims run out by themselves.
///
/// `wake` says that events were written; each notification reaches all sinks. A sink whose settings are not valid
/// is logged and left out; `sink::Settings::check` tells before.
pub async fn run(
    store: Arc<dyn Deliveries>,
    settings: Settings,
    claimant: Claimant,
    metrics: Arc<Metrics>,
    wake: Arc<Notify>,
    stop: CancellationToken,
) {
    let mut loops = JoinSet::new();
    let mut nudges = Vec::new();
    let (read, mut statuses) = (Arc::new(Notify::new()), HashMap::new());
    let poll = settings.poll.clamp(POLL_MIN, POLL_MAX);
    for sink in settings.sinks {
        let name = sink.name.clone();
        let sink = match Sink::new(sink) {
            Ok(sink) => sink,
            Err(why) => {
                tracing::error!(sink = name, why, "the sink is not valid: its events wait");
                continue;
            }
        };
        let nudge = Arc::new(Notify::new());
        nudges.push(Arc::clone(&nudge));
        let status = Arc::new(StatusWatch::new(&read));
        statuses.insert(name.clone(), Arc::clone(&status));
        let worker = Arc::new(SinkWorker {
            store: Arc::clone(&store),
            claimant: claimant.clone(),
            slots: slots_of(&sink),
            status,
            sink: Arc::new(sink),
            metrics: Arc::clone(&metrics),
            nudge,
            poll,
            stop: stop.clone(),
            failing: AtomicBool::new(false),
        });
        // What a loop holds of the sink goes with it: the next one begins with all slots.
        let begin = move || Arc::new(worker.fresh()).work();
        loops.spawn(tasks::kept(Loop::Sink, name, stop.clone(), begin));
    }
    let every = poll * READ_FACTOR;
    let reader = Arc::new(StatusReader { store, claimant, metrics, statuses, read, every });
    let read_on = move || Arc::clone(&reader).run();
    let mut reading = JoinSet::new();
    reading.spawn(tasks::kept(Loop::SinkStates, "", stop.clone(), read_on));
    let ended = async {
        stop.cancelled().await;
        while loops.join_next().await.is_some() {}
    };
    tokio::select! {
        () = ended => {}
        () = pass_on(&wake, &nudges) => {}
    }
}

/// Hands each nudge to every sink, whether it was meant for one waiter or for all. Never returns.
async fn pass_on(wake: &Notify, nudges: &[Arc<Notify>]) {
    let mut notified = std::pin::pin!(wake.notified());
    loop {
        notified.as_mut().enable();
        notified.as_mut().await;
        // Registered again before the sinks are told, so that no nudge falls in between.
        notified.set(wake.notified());
        notified.as_mut().enable();
        for nudge in nudges {
            nudge.notify_one();
        }
    }
}
