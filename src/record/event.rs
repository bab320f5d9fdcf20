//! What a stored outcome announces: a route's templates become events with stable ids and keys.
//!
//! Pure: the same record, context and answer give the same events, whoever completes the record.

use bytes::Bytes;
use uuid::Uuid;

/// An event as it is written in the completing transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Made from `key` by a fixed hash, so that a completion that is repeated yields the same id.
    pub id: Uuid,
    /// Unique and stable: the record's id, the event's name, and the element's key where there are several.
    pub key: String,
    /// The event's type, `order.created` say.
    pub kind: String,
    /// Position among the events of its record, from 0.
    pub position: u16,
    /// Events with equal ordering keys may be delivered in order.
    pub ordering_key: Option<String>,
    /// The message, exactly as it is sent and signed.
    pub payload: Bytes,
    /// To which sinks; none: it stands as `discarded`.
    pub sinks: Vec<String>,
}
