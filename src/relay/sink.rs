//! To whom events go: what every sink has, whatever it is spoken to in, and one file for each kind of target.
//!
//! What must stay true:
//!
//! - A target gets an event and a deadline, and says by then what it knows ([`Delivered`]). It keeps no event, and
//!   decides nothing about the next attempt: that is [`super::verdict`].
//! - Ids and bytes are the event's, in every attempt and for every kind of target.
//! - Secrets appear in no log, no error and no Debug output.
//!
//! Another kind is one more variant of [`Target`] and of `Transport`, with a file beside [`http`] that has its settings,
//! their check, and `deliver`. A process that dies here leaves a claim that runs out: the event is delivered again.

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
    /// Ceiling of the pause after the first failure; doubles with each further one.
    pub backoff_base: Duration,
    /// Longest pause between two attempts.
    pub backoff_max: Duration,
    /// An event is dead only when this many attempts failed ...
    pub attempts_max: u32,
    /// ... and it is at least this old.
    pub age_max: Duration,
    /// An event that the sink refused this often (400, 413, 415, 422) is dead.
    pub refusals_max: u32,
    /// So many failures in a row pause the sink.
    pub pause_after: u32,
    /// In which order events are delivered.
    pub order: Order,
    /// Which events it wants; whoever writes events reads it, the relay delivers what is pending.
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
    /// The sink as those see it who write events.
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
            // Made of parts that cannot be wrong.
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

/// Who carries events to one target.
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

/// How a delivery ended, with what the sink asked for.
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
    /// A sink with connections of its own.
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

    /// In which order it gets its events.
    #[must_use]
    pub fn order(&self) -> Order {
        self.settings.order
    }

    /// So many failures in a row pause it.
    #[must_use]
    pub fn pause_after(&self) -> u32 {
        self.settings.pause_after
    }

    /// How patient the relay is with it.
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

    /// By how many seconds its clock is ahead of ours, where it has told.
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
