//! Fault points: named places at which a test makes this process die, wait, panic or fail.
//!
//! A point stands at every arrow of a record's life and of the relay. What happens there is said once, when the
//! process starts, by the variable `ONCEGATE_FAULT` (see `docs/testing.md`):
//!
//! ```text
//! ONCEGATE_FAULT="after-reserve=kill"             the process kills itself with SIGKILL when it passes there
//! ONCEGATE_FAULT="batch-committed@2=error"        the second passage fails, as a database that is lost would make it
//! ONCEGATE_FAULT="connected=pause:/tmp/go"        writes /tmp/go.reached, and goes on once /tmp/go is there
//! ONCEGATE_FAULT="answer-body=panic,settling=kill"   several, each once
//! ```
//!
//! What must stay true: without the feature `fault-points`, which only tests turn on, every function here is empty, no
//! variable is read, and [`Injected`] has no value, so the branches that handle it do not exist. A new point is a line
//! in [`Point`] and a line at its place, or a verb of the store in [`Verb`]; `tests/it/crash_points.rs`
//! fails until it says what is right there.

#[cfg(not(feature = "fault-points"))]
mod absent;
#[cfg(feature = "fault-points")]
mod armed;

#[cfg(not(feature = "fault-points"))]
pub use self::absent::{Injected, arm, fallible, is_variable, point, point_blocking};
#[cfg(feature = "fault-points")]
pub use self::armed::{Injected, arm, fallible, is_variable, point, point_blocking};

/// Whether this program has its fault points: never true of one that is shipped.
pub const COMPILED: bool = cfg!(feature = "fault-points");

/// What `--version` tells.
pub const VERSION: &str = if COMPILED {
    concat!(env!("CARGO_PKG_VERSION"), " (with fault points: for tests only)")
} else {
    env!("CARGO_PKG_VERSION")
};

macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* } $($more:tt)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$vdoc])* $variant,)*
            $($more)*
        }

        impl $name {
            /// Those that are no verb's.
            const NAMED: &'static [(Self, &'static str)] = &[$((Self::$variant, $text),)*];
        }
    };
}

named! {
    /// A verb of the store that changes something.
    Verb {
        /// A reservation.
        Reserve = "reserve",
        /// The next attempt, or an expired record's successor.
        TakeOver = "take-over",
        /// The next attempt, after the upstream was asked about the one before and knew nothing of it.
        Raise = "raise",
        /// An outcome with its events.
        Complete = "complete",
        /// An attempt that did not execute.
        Release = "release",
        /// An attempt of which nobody knows.
        MarkUnknown = "mark-unknown",
        /// What dead owners left.
        MarkDead = "mark-dead",
        /// An outcome that found its record gone on, for the audit table.
        NoteLateOutcome = "note-late-outcome",
        /// The gateway's own event about an unknown record.
        Announce = "announce",
        /// The lease.
        Heartbeat = "heartbeat",
        /// The lease's end.
        Retire = "retire",
        /// Events for the relay.
        Claim = "claim",
        /// Verdicts of the relay.
        Acknowledge = "acknowledge",
        /// A sink's pause, its probe, or its resumption.
        ChangeSink = "change-sink",
        /// A sink that an operator pauses or resumes.
        OperateSink = "operate-sink",
        /// Events once more.
        Redeliver = "redeliver",
        /// Events given up by an operator.
        Discard = "discard",
        /// Expired records.
        SweepRecords = "sweep-records",
        /// Delivered events.
        SweepEvents = "sweep-events",
        /// Old leases.
        SweepLeases = "sweep-leases",
        /// A record that an operator frees.
        OperatorRelease = "operator-release",
        /// A record that an operator completes.
        OperatorComplete = "operator-complete",
    }
}

named! {
    /// A place in the program.
    Point {
        /// A batch of reservations or completions is about to run.
        BatchBegun = "batch-begun",
        /// It is committed, and nobody has been told.
        BatchCommitted = "batch-committed",
        /// SQLite: the record says `completed`, its events are not written; nothing is committed.
        HalfCompleted = "half-completed",
        /// What an operator did and its row in the audit table are written; nothing is committed. On Postgres most such
        /// actions are one statement, and only what is done to events passes here.
        Audited = "audited",
        /// A migration's statements have run, its version is not noted; nothing is committed.
        Migrating = "migrating",
        /// The reservation is held, the upstream not yet connected to.
        BeforeConnect = "before-connect",
        /// Connected, and not one byte written.
        Connected = "connected",
        /// The socket took bytes of the request. Passed at each write.
        BytesSent = "bytes-sent",
        /// The head of the answer has been read.
        AnswerHead = "answer-head",
        /// All that is to be read of the answer has been read.
        AnswerBody = "answer-body",
        /// An answer came after its time-out; the caller has its 504, and the record says `unknown`.
        LateAnswer = "late-answer",
        /// The upstream has said what became of an attempt, and nothing is done about it: the record is in progress.
        QuestionAnswered = "question-answered",
        /// The database did not take the outcome, and it is about to be written to the spill.
        Spilling = "spilling",
        /// It is in the spill, synced (or did not fit); nobody has been told.
        Spilled = "spilled",
        /// The end is durable (or pending), the caller has nothing yet.
        BeforeReply = "before-reply",
        /// A caller's socket took bytes of an answer. Passed at each write.
        Replying = "replying",
        /// The retrier is about to write a pending end.
        Settling = "settling",
        /// An event is claimed and about to be sent to its sink.
        BeforeDelivery = "before-delivery",
        /// The sink has answered, the verdict is not written.
        AfterDelivery = "after-delivery",
    }
    /// A verb is about to be asked of the store: nothing is changed.
    Before(Verb),
    /// The store has done it, durably, and the caller does not know.
    After(Verb),
}

impl Verb {
    /// Of a method of the store, where it changes something.
    #[must_use]
    pub fn of_method(method: &str) -> Option<Self> {
        let is =
            |name: &str| name.bytes().map(|c| if c == b'-' { b'_' } else { c }).eq(method.bytes());
        Self::NAMED.iter().find(|(_, name)| is(name)).map(|(verb, _)| *verb)
    }
}

impl Point {
    /// Every point with its name.
    pub fn all() -> impl Iterator<Item = (Self, String)> {
        let named = Self::NAMED.iter().map(|(point, name)| (*point, (*name).to_owned()));
        let verbs = Verb::NAMED.iter().flat_map(|(verb, name)| {
            [
                (Self::Before(*verb), format!("before-{name}")),
                (Self::After(*verb), format!("after-{name}")),
            ]
        });
        named.chain(verbs)
    }

    /// Whether there is somebody to whom an error can be given there.
    #[must_use]
    pub fn can_fail(self) -> bool {
        matches!(self, Self::Before(_) | Self::After(_) | Self::BatchBegun | Self::BatchCommitted)
    }
}
