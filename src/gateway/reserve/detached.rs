//! Attempts whose records were given up as `unknown`, and whose answers may still come.

use super::attempt::{InFlight, Timing};
use super::flight::Progress;
use super::retrier::PendingWrite;
use super::single_flight::SingleFlight;
use super::vocabulary::FlightEnd;
use crate::record::Fence;

/// An attempt whose record says `unknown`, or will: its flight is over, and its answer may still come.
pub(in crate::gateway) struct Detached(Box<InFlight>);

impl Detached {
    pub(in crate::gateway) fn fence(&self) -> Fence {
        self.0.fence
    }
}

impl InFlight {
    /// As [`InFlight::settled`]; the attempt lives on without a flight.
    pub(in crate::gateway) fn detach(mut self: Box<Self>, ending: FlightEnd) -> Detached {
        if let Some(leader) = self.leader.take() {
            leader.end(ending);
        }
        self.timing = Timing::Late;
        Detached(self)
    }

    /// As [`InFlight::leave_pending`]; the attempt lives on without a flight.
    pub(in crate::gateway) fn detach_pending(mut self: Box<Self>, write: PendingWrite) -> Detached {
        self.hand_over(write);
        self.timing = Timing::Late;
        Detached(self)
    }
}

impl SingleFlight {
    /// A late answer has come; see [`Flights::resume`](super::flight::Flights::resume).
    pub(in crate::gateway) fn resume(&self, detached: Detached) -> Box<InFlight> {
        let Detached(mut in_flight) = detached;
        let (record, fingerprint) = (in_flight.fence.id, in_flight.fingerprint);
        let running = Progress::Running { record, fingerprint, caller: in_flight.caller.clone() };
        in_flight.leader = self.flights.resume(&in_flight.scope, running);
        in_flight
    }
}
