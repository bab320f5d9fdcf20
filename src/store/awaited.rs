//! A store that is not open yet.
//!
//! A process that starts beside its database listens before it has one. What must stay true: until the gate is opened, which
//! happens once and for good, every verb is [`Error::Unavailable`] at once, and nothing reaches a database. So nothing is
//! reserved, and no record is judged, before the start has drained the spill and taken a lease.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::layer::Layer;
use super::{Error, OperatorsLayer, OutboxLayer, RecordsLayer, SinksLayer, Store};

/// A store that is not open yet, and what opens it.
#[must_use]
pub fn awaited() -> (Arc<dyn Store>, Gate) {
    let why = Mutex::new("the start is not finished".to_owned());
    let way = Arc::new(Way { store: OnceLock::new(), begun: Instant::now(), why });
    (Arc::new(Awaited(Arc::clone(&way))), Gate(way))
}

struct Awaited(Arc<Way>);

struct Way {
    store: OnceLock<Arc<dyn Store>>,
    begun: Instant,
    why: Mutex<String>,
}

/// Opens the store that is awaited. Where it is dropped, that store stays away.
pub struct Gate(Arc<Way>);

impl Gate {
    /// From now on this is the store.
    pub fn open(self, store: Arc<dyn Store>) {
        // Set here only, and by value: so it is once.
        drop(self.0.store.set(store));
    }

    /// Why it could not be opened so far, for whoever asks meanwhile.
    pub fn explain(&self, why: String) {
        *self.0.why.lock() = why;
    }
}

/// Why a verb was not done.
#[derive(Debug, thiserror::Error)]
#[error("it is not open since the start, {} ago: {why}", humantime::format_duration(*.since))]
struct NotOpen {
    since: Duration,
    why: String,
}

impl Layer for Awaited {
    fn beneath(&self) -> Result<&dyn Store, Error> {
        let Way { store, begun, why } = &*self.0;
        store.get().map(AsRef::as_ref).ok_or_else(|| {
            let since = Duration::from_secs(begun.elapsed().as_secs());
            let why = why.lock().clone();
            Error::Unavailable(NotOpen { since, why }.into())
        })
    }
}

impl RecordsLayer for Awaited {}
impl OutboxLayer for Awaited {}
impl SinksLayer for Awaited {}
impl OperatorsLayer for Awaited {}
