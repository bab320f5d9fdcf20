//! Completions for a database that refuses some of what they hold: without it, one part after the other.

use std::sync::Arc;
use std::time::Instant;

use super::{Completion, Error, Records, Settled};
use crate::record::{Answer, KeptBody, Spelling};

/// What became of a [`Completion`], and in which form it was written.
#[derive(Clone, Debug)]
pub struct Written {
    /// What became of it.
    pub settled: Settled,
    /// As it was written, where it is [`Settled::Done`].
    pub completion: Arc<Completion>,
}

/// Completes a record. Of an outcome that the database refuses to hold it leaves out what may be the reason: first the
/// ordering keys of its events, then headers and body of its answer. What was executed, and its events, are kept.
///
/// # Errors
/// As [`Records::complete`]; [`Error::Refused`] where the database refuses the last form, too.
pub async fn complete_in_some_form(
    store: &dyn Records,
    completion: &Arc<Completion>,
    deadline: Instant,
) -> Result<Written, Error> {
    let record = completion.fence.id;
    let mut completion = Arc::clone(completion);
    for (left_out, lessen) in LESSER_FORMS {
        match store.complete(Arc::clone(&completion), deadline).await {
            Ok(settled) => return Ok(Written { settled, completion }),
            Err(Error::Refused(cause)) => {
                tracing::error!(%record, %cause, "the database refused a completion; again without {left_out}");
                lessen(Arc::make_mut(&mut completion));
            }
            Err(error) => return Err(error),
        }
    }
    let settled = store.complete(Arc::clone(&completion), deadline).await?;
    Ok(Written { settled, completion })
}

/// What is left out, one after the other.
type Lessen = fn(&mut Completion);

const LESSER_FORMS: [(&str, Lessen); 2] = [
    ("ordering keys", |completion| {
        for event in &mut completion.events {
            event.ordering_key = None;
        }
    }),
    ("headers and body", |completion| {
        let Answer { headers, spelling, body, .. } = &mut completion.answer;
        headers.clear();
        *spelling = Spelling::default();
        *body = KeptBody::NotRetained;
    }),
];
