//! A store with a fault point before and after each verb that changes something; see `fault`.
//!
//! Before the verb a fault means "nothing was changed", after it "done, and not confirmed": what the two errors of a
//! store say. The verbs that have points are those of [`Verb`]: all that change something, but for
//! [`Outbox::wake_deferred`](super::Outbox::wake_deferred) and [`Records::reinstate`](super::Records::reinstate), which are
//! asked again and again.

use std::sync::Arc;

use super::layer::Layer;
use super::{Error, OperatorsLayer, OutboxLayer, RecordsLayer, SinksLayer, Store};
use crate::fault::{self, Injected, Point, Verb};

/// The same store, with fault points.
#[must_use]
pub fn faulty(store: Arc<dyn Store>) -> Arc<dyn Store> {
    Arc::new(Faulty(store))
}

struct Faulty(Arc<dyn Store>);

impl Layer for Faulty {
    fn beneath(&self) -> Result<&dyn Store, Error> {
        Ok(&*self.0)
    }

    async fn around<T: Send>(
        &self,
        verb: &'static str,
        passed_on: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        let Some(verb) = Verb::of_method(verb) else { return passed_on.await };
        let unchanged = |fault: Injected| Error::Unavailable(fault.into());
        let untold = |fault: Injected| Error::InDoubt(fault.into());
        fault::fallible(Point::Before(verb)).await.map_err(unchanged)?;
        let done = passed_on.await?;
        fault::fallible(Point::After(verb)).await.map_err(untold)?;
        Ok(done)
    }
}

impl RecordsLayer for Faulty {}
impl OutboxLayer for Faulty {}
impl SinksLayer for Faulty {}
impl OperatorsLayer for Faulty {}
