//! The labels of metrics. No label comes from a caller, so the number of series is bounded.

use std::fmt::Write as _;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};

macro_rules! label_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$vdoc])* $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The label's value.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
                encoder.write_str(self.as_str())
            }
        }
    };
}

label_enum!(
    /// How a request was answered.
    Reply {
        /// Forwarded, and its answer kept.
        Executed = "executed",
        /// Answered from the store.
        Replayed = "replayed",
        /// Waited for the first request under its key and got its answer.
        Waited = "waited",
        /// Forwarded, and known not to have executed: the key is free again.
        Released = "released",
        /// Forwarded; it is not known whether it executed.
        Unknown = "unknown",
        /// Refused: another request under a used key.
        Mismatch = "mismatch",
        /// Refused: still running after the wait.
        InProgress = "in_progress",
        /// Refused: the stored answer is not for this caller.
        Forbidden = "forbidden",
        /// Refused: the caller, or its right to the stored answer, could not be checked.
        Unchecked = "unchecked",
        /// Refused: a record whose outcome is unknown.
        Held = "held",
        /// Refused: executed, its answer was too large to keep.
        NotRetained = "not_retained",
        /// Refused: executed, its answer is kept in a coding that the caller does not accept.
        NotAcceptable = "not_acceptable",
        /// Refused: key, tenant or request not valid.
        Invalid = "invalid",
        /// Refused: a limit is reached.
        Overloaded = "overloaded",
        /// Not sent, because of a mistake of the gateway.
        Failed = "failed",
        /// Refused: no reservation could be made.
        StoreUnavailable = "store_unavailable",
        /// Passed through unprotected.
        Passed = "passed",
        /// Forwarded unprotected, because the store was away.
        Bypassed = "bypassed",
    }
);

label_enum!(
    /// Why a log line was lost.
    Loss {
        /// Too many waited to be written.
        QueueFull = "queue_full",
        /// Standard error took no bytes.
        WriteFailed = "write_failed",
    }
);

label_enum!(
    /// What would have happened to a request that was only observed.
    Would {
        /// The first under its key: executed.
        Execute = "execute",
        /// Passed through: it has no key and needs none.
        Pass = "pass",
        /// Answered with the stored answer.
        Replay = "replay",
        /// Kept waiting for the first request under its key.
        Wait = "wait",
        /// Refused: another request under a used key.
        Mismatch = "mismatch",
        /// Refused: the stored answer is not for this caller.
        Forbidden = "forbidden",
        /// Refused: the first one's outcome is unknown.
        Hold = "hold",
        /// Refused: the first one's answer is too large to keep.
        NotRetained = "not_retained",
        /// Refused: it has no key.
        KeyMissing = "key_missing",
        /// Refused: its key is not valid.
        KeyInvalid = "key_invalid",
        /// Refused: its tenant or caller is not known.
        TenantMissing = "tenant_missing",
        /// Refused: its body is too large.
        BodyTooLarge = "body_too_large",
        /// Refused: a limit is reached.
        Overloaded = "overloaded",
        /// Refused for another reason, which is in the log.
        Refuse = "refuse",
        /// Not known: its body was not complete.
        Unjudged = "unjudged",
    }
);

label_enum!(
    /// The timed steps of a request.
    Step {
        /// Canonical form and hashes.
        Fingerprint = "fingerprint",
        /// The reservation's commit.
        Reserve = "reserve",
        /// The upstream.
        Forward = "forward",
        /// The completion's commit.
        Complete = "complete",
    }
);

label_enum!(
    /// The result of an attempt after its time-out.
    LateAnswer {
        /// An answer, kept: the record is completed.
        Completed = "completed",
        /// An answer that says that the request did not execute.
        Released = "released",
        /// An answer that leaves the outcome unknown.
        Unknown = "unknown",
        /// An answer that the store has not taken yet, or whose record has changed since.
        NotStored = "not_stored",
        /// No answer in time, a broken connection, or the end of the process.
        Missed = "missed",
        /// Not awaited, because too many others were.
        NoRoom = "no_room",
    }
);

label_enum!(
    /// How a delivery ended.
    Delivery {
        /// Taken by the sink.
        Sent = "sent",
        /// Failed, tried again later.
        Failed = "failed",
        /// Refused by the sink (400, 413, 415, 422), tried again later.
        Refused = "refused",
        /// Given back without using an attempt: the sink is gone, busy or down, or this process cannot open the payload.
        Returned = "returned",
        /// Failed for good.
        Dead = "dead",
        /// Its claim had ended when the verdict came.
        LostClaim = "lost_claim",
    }
);

label_enum!(
    /// The result of a probe of a paused sink.
    Probe {
        /// The sink answers: it is resumed.
        Well = "well",
        /// The sink does not answer yet.
        Failed = "failed",
        /// The sink says that it is gone.
        Gone = "gone",
        /// There was nothing to send.
        Idle = "idle",
    }
);

label_enum!(
    /// The result of a look-up of an unknown outcome.
    LookupEnd {
        /// The request had executed.
        Found = "found",
        /// The request had not executed.
        NotFound = "not_found",
        /// The upstream did not say.
        Failed = "failed",
    }
);

label_enum!(
    /// How a tunnel ended.
    TunnelEnd {
        /// Both sides closed it.
        Closed = "closed",
        /// One of its connections broke.
        Failed = "failed",
        /// Nothing passed for too long.
        Idle = "idle",
        /// This process stops.
        Shutdown = "shutdown",
    }
);

label_enum!(
    /// The direction of bytes in a tunnel.
    Way {
        /// From the caller to the API.
        ToApi = "to_api",
        /// From the API to the caller.
        ToCaller = "to_caller",
    }
);

label_enum!(
    /// What the sweeper deletes.
    Swept {
        /// Expired records.
        Records = "records",
        /// Delivered events past their retention.
        Events = "events",
    }
);

label_enum!(
    /// What happened to an outcome from the spill.
    Drained {
        /// The database took it.
        Completed = "completed",
        /// The database took it: the attempt had not executed. Its key is free, or its record is unknown as before.
        Released = "released",
        /// The database had it already.
        Already = "already",
        /// Another attempt has the record.
        FencedOff = "fenced_off",
        /// The database refuses it, for good.
        Refused = "refused",
    }
);

label_enum!(
    /// What happened to a commit that the database had confirmed and then lost.
    WentBack {
        /// A reservation of an attempt in flight: written again.
        Reservation = "reservation",
        /// A completion whose record was there: completed again.
        CompletedAgain = "completed_again",
        /// A completion whose record was lost too: both were written again.
        WrittenBack = "written_back",
        /// An attempt whose answer is not in memory: its record is unknown.
        Unknown = "unknown",
        /// Another record has its scope now: the outcome is in the audit table.
        Overtaken = "overtaken",
    }
);

/// Which labels a metric has.
macro_rules! label_sets {
    ($($name:ident { $($label:ident: $kind:ty),* })*) => {
        $(
            #[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
            pub(super) struct $name {
                $(pub(super) $label: $kind,)*
            }
        )*
    };
}

label_sets! {
    ByDrained { result: Drained }
    ByWentBack { result: WentBack }
    ByOperation { operation: String, reply: Reply }
    ByWould { operation: String, would: Would }
    ByAsked { operation: String, result: LookupEnd }
    ByStep { step: Step }
    BySink { sink: String }
    ByDelivery { sink: String, result: Delivery }
    ByPause { sink: String, reason: &'static str }
    ByProbe { sink: String, result: Probe }
    ByLateAnswer { result: LateAnswer }
    ByTunnelEnd { end: TunnelEnd }
    ByWay { way: Way }
    BySwept { what: Swept }
    ByLoss { reason: Loss }
    ByTask { task: &'static str }
}
