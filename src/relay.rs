//! Delivers the outbox: a loop for each sink claims due events, sends them, and writes the results.
//!
//! ```text
//! wake-up, timer -> claim (at most the free slots) -> deliver, concurrently -> verdict -> acknowledge, in batches
//!                 ^                                                              |
//!                 +-- (while the sink is paused: one probe at a time) <-----------+
//! ```
//!
//! This file starts a [`worker`] for each sink, starts it again after a panic, and starts one reader of the [`status`] of all
//! sinks. Invariants:
//!
//! - The outbox table says which events are pending. A wake-up only makes a worker look sooner.
//! - Sinks share nothing: a sink that is slow or down, or a worker that panics, delays no other sink.
//! - The database says whether a sink is paused ([`status`]). A paused sink gets only probes ([`probe`]).
//! - A verdict that the database does not take is repeated until its claim ends, and then dropped ([`acknowledge`]). The next
//!   worker that claims the event delivers it again under the same id.
//!
//! A process that dies here leaves claims. They run out, and other processes may take them when its lease has ended.

mod acknowledge;
pub mod address;
mod claim;
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

/// The status of the sinks is read this many times less often than the outbox.
const READ_FACTOR: u32 = 5;

/// The sinks of the relay, and how often it polls.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The sinks. Their names are unique.
    pub sinks: Vec<sink::Settings>,
    /// Pause between two polls while events come in (for example 100 ms). It grows up to 8 times while none come.
    pub poll: Duration,
}

/// Delivers until `stop`. Then it gives back the claims that are not sent, waits for the deliveries in flight (each bounded by
/// the time-out of its sink), writes the verdicts and ends. The future may be dropped at any time: claims run out.
///
/// `wake` is notified when events were written; each notification reaches all sinks. A sink with invalid settings is
/// logged and left out; `sink::Settings::check` finds that earlier.
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
        // A loop owns the slots of its sink, so the next loop begins with all of them.
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

/// Passes each notification on to every sink. Never returns.
async fn pass_on(wake: &Notify, nudges: &[Arc<Notify>]) {
    let mut notified = std::pin::pin!(wake.notified());
    loop {
        notified.as_mut().enable();
        notified.as_mut().await;
        // Registered again before the sinks are notified, so that no notification is lost in between.
        notified.set(wake.notified());
        notified.as_mut().enable();
        for nudge in nudges {
            nudge.notify_one();
        }
    }
}
