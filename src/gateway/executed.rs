//! An attempt that executed: its answer, as it is kept, and the events of its route.

use std::sync::Arc;

use super::complete::Completer;
use super::reserve::InFlight;
use super::settle::Executed;
use crate::clock;
use crate::record::Answer;
use crate::record::event::{Event, Origin};
use crate::store::Completion;

impl Completer<'_> {
    /// What is known of an attempt with this answer. `found`: by a look-up.
    pub(super) fn executed(&self, in_flight: &InFlight, answer: Answer, found: bool) -> Executed {
        let events = self.events(in_flight, &answer);
        let completion = Arc::new(Completion {
            scope: in_flight.scope.clone(),
            fence: in_flight.fence,
            answer,
            retention: self.route.policy.retention,
            events,
        });
        let (fingerprint, caller) = (in_flight.fingerprint, in_flight.caller.clone());
        Executed { completion, fingerprint, caller, row: in_flight.row().cloned(), found }
    }

    fn events(&self, in_flight: &InFlight, answer: &Answer) -> Vec<Event> {
        let rendered = self.route.events.render(&Origin {
            record: in_flight.fence.id,
            scope: &in_flight.scope,
            attempt: in_flight.fence.attempt,
            at: clock::time_of_day(),
            context: self.context,
            answer,
        });
        if rendered.failed > 0 {
            tracing::warn!(record = %in_flight.fence.id, failed = rendered.failed, "event templates failed");
            self.metrics.event_errors(rendered.failed);
        }
        rendered.events
    }
}
