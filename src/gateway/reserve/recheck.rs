//! A record that is worked on here may have been completed by the application itself. A duplicate asks the store for that
//! before it is refused, and one that comes late asks once, for all of them.

use std::sync::Arc;
use std::time::Instant;

use super::cache::Replay;
use super::flight::{Flight, RECHECK_EVERY};
use super::single_flight::SingleFlight;
use super::vocabulary::{KeyedRequest, Refusal};
use super::{Admission, from_record};
use crate::gateway::settle::Stored;
use crate::record::{Record, RecordId, State};

impl SingleFlight {
    /// The wait is over, and the execution is not. Before the caller is refused, the store may know better.
    pub(super) async fn in_progress(
        &self,
        request: &KeyedRequest,
        record: Option<RecordId>,
        flight: &Flight,
    ) -> Admission {
        let cached = self.cache.get(&request.scope, Instant::now());
        if let Some(replay) = cached {
            return from_record(request, replay);
        }
        if flight.recheck_is_due()
            && let Ok(Some(admission)) =
                tokio::time::timeout(RECHECK_EVERY, self.recheck(request)).await
        {
            return admission;
        }
        Admission::Refuse(Refusal::InProgress { record })
    }

    /// The answer of a record that somebody else completed while it is being worked on here.
    pub(super) async fn recheck(&self, request: &KeyedRequest) -> Option<Admission> {
        let Ok(Some(record)) = self.store.find(&request.scope).await else { return None };
        let Record { fence, fingerprint, caller, state: State::Completed(completed) } = record
        else {
            return None;
        };
        if completed.time_left.is_zero() {
            return None;
        }
        let completed = *completed;
        let replay = Arc::new(Replay::from(Stored { fence, fingerprint, caller, completed }));
        self.remember(&request.scope, &replay);
        Some(from_record(request, replay))
    }
}
