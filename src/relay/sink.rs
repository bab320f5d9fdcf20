//! Sinks: what every sink has, and one file for each kind of target.
//!
//! Invariants:
//!
//! - A target gets an event and a deadline, and returns by then what it knows ([`Delivered`]). It keeps no event, and does not
//!   decide about the next attempt: [`super::verdict`] does.
//! - Every attempt and every kind of target uses the same id and bytes of an event.
//! - Secrets appear in no log, no error and no Debug output.
//!
//! A new kind needs a variant of [`Target`] and of `Transport`, and a file beside [`http`] with its settings, their check, and
//! `deliver`. After a crash the claim runs out, and the event is delivered again.

pub mod broker;
pub mod http;
pub mod nats;
#[cfg(feature = "redis")]
pub mod redis;

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::verdict::{Evidence, Patience, clean};
use crate::record::event::subscription::{Subscriber, TypeFilter};
use crate::store::{Claimed, Order};

/// Most deliveries at once to one sink.
const CONCURRENCY_MAX: usize = 10_000;

/// Longest time for one delivery.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// A sink as configured.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its name: the value of the column `sink`, and the label of its metrics.
    pub name: String,
    /// How long one delivery may take in all.
    pub timeout: Duration,
    /// Most deliveries at once.
    pub concurrency: usize,
    /// Ceiling of the pause after the first failure. It doubles with each further one.
    pub backoff_base: Duration,
    /// Longest pause between two attempts.
    pub backoff_max: Duration,
    /// An event is dead only when this many attempts failed ...
    pub attempts_max: u32,
    /// ... and it is at least this old.
    pub age_max: Duration,
    /// An event that the sink refused this often (400, 413, 415, 422) is dead.
    pub refusals_max: u32,
    /// This many failures in a row pause the sink.
    pub pause_after: u32,
    /// The order of deliveries.
    pub order: Order,
    /// Which events it gets. Used when events are written; the relay delivers all that are pending.
    pub events: TypeFilter,
    /// Where events go, and how.
    pub target: Target,
}

/// The kinds of targets.
#[derive(Clone, Debug)]
pub enum Target {
    /// A webhook.
    Http(http::Settings),
    /// A stream of NATS JetStream.
    Nats(nats::Settings),
    /// A stream of Redis.
    #[cfg(feature = "redis")]
    Redis(redis::Settings),
}

impl Settings {
    /// The sink, for the code that writes events.
    #[must_use]
    pub fn subscriber(&self) -> Subscriber {
        Subscriber { sink: self.name.clone(), events: self.events.clone() }
    }

    /// Whether a sink can be made of these settings.
    ///
    /// # Errors
    /// What is wrong and what to do about it, without secrets.
    pub fn check(&self) -> Result<(), String> {
        let timely = !self.timeout.is_zero() && self.timeout <= TIMEOUT_MAX;
        if !timely || !(1..=CONCURRENCY_MAX).contains(&self.concurrency) {
            return Err(format!(
                "timeout must be above 0 and at most {TIMEOUT_MAX:?}, concurrency from 1 to {CONCURRENCY_MAX}"
            ));
        }
        match &self.target {
            Target::Http(settings) => settings.check(),
            // All of its parts are already checked.
            Target::Nats(_) => Ok(()),
            #[cfg(feature = "redis")]
            Target::Redis(_) => Ok(()),
        }
    }
}

/// A sink that can be delivered to.
pub struct Sink {
    settings: Settings,
    transport: Transport,
}

/// The client of one target.
enum Transport {
    Http(Box<http::Transport>),
    Nats(Box<nats::Transport>),
    #[cfg(feature = "redis")]
    Redis(Box<redis::Transport>),
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sink").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// The result of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// What is known.
    pub evidence: Evidence,
    /// The sink's `Retry-After`, not yet cut to the maximum.
    pub retry_after: Option<Duration>,
}

impl Delivered {
    /// The target has it.
    fn taken() -> Self {
        Self { evidence: Evidence::Taken, retry_after: None }
    }

    /// The target will never take this event.
    fn refused(what: &str) -> Self {
        Self { evidence: Evidence::Refused { what: clean(what) }, retry_after: None }
    }

    /// No answer came.
    pub(super) fn failed(what: &str) -> Self {
        Self { evidence: Evidence::Failed { what: clean(what) }, retry_after: None }
    }
}

impl Sink {
    /// A sink with its own connections.
    ///
    /// # Errors
    /// What is wrong with the settings, without secrets.
    pub fn new(settings: Settings) -> Result<Self, String> {
        settings.check()?;
        let transport = match &settings.target {
            Target::Http(target) => {
                Transport::Http(Box::new(http::Transport::new(&settings, target)?))
            }
            Target::Nats(target) => {
                Transport::Nats(Box::new(nats::Transport::new(&settings, target)))
            }
            #[cfg(feature = "redis")]
            Target::Redis(target) => {
                Transport::Redis(Box::new(redis::Transport::new(&settings, target)))
            }
        };
        Ok(Self { settings, transport })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// How long one delivery may take in all.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    /// Most deliveries at once.
    #[must_use]
    pub fn concurrency(&self) -> usize {
        self.settings.concurrency
    }

    /// The order of its deliveries.
    #[must_use]
    pub fn order(&self) -> Order {
        self.settings.order
    }

    /// This many failures in a row pause it.
    #[must_use]
    pub fn pause_after(&self) -> u32 {
        self.settings.pause_after
    }

    /// When it is retried, and when an event is dead.
    #[must_use]
    pub fn patience(&self) -> Patience {
        Patience {
            base: self.settings.backoff_base,
            max: self.settings.backoff_max,
            attempts_max: self.settings.attempts_max,
            age_max: self.settings.age_max,
            refusals_max: self.settings.refusals_max,
        }
    }

    /// By how many seconds its clock is ahead of ours, if its answers have shown that.
    #[must_use]
    pub fn clock_ahead(&self) -> Option<i64> {
        match &self.transport {
            Transport::Http(transport) => transport.clock_ahead(),
            Transport::Nats(_) => None,
            #[cfg(feature = "redis")]
            Transport::Redis(_) => None,
        }
    }

    /// Sends an event once and returns by the deadline.
    pub async fn deliver(&self, event: &Claimed) -> Delivered {
        let deadline = Instant::now() + self.settings.timeout;
        match &self.transport {
            Transport::Http(transport) => transport.deliver(event, deadline).await,
            Transport::Nats(transport) => transport.deliver(event, deadline).await,
            #[cfg(feature = "redis")]
            Transport::Redis(transport) => transport.deliver(event, deadline).await,
        }
    }
}
