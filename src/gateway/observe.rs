//! `mode = "observe"`: requests pass through, and the log and metrics say what would have become of them.
//!
//! A request is forwarded as if no route named it, streamed, at once. A copy of its body, within the route's limit, is read
//! by the very code that reads keyed requests ([`super::intake`]), in a task of its own; what it would have met is looked up in
//! a [`Memory`] of this process, which its answer then completes. No database is asked or written.
//!
//! What must stay true: whatever fails here changes nothing for the caller: no refusal, no wait for anything but its own
//! copy being hashed, and that bounded; a panic ends the task alone. The memory is bounded by entries and holds digests
//! only. It is lost with the process, and each replica has its own: what is counted is a lower bound.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;
use quick_cache::unsync::Cache;
use sha2::{Digest as _, Sha256};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::budget::Permit;
use super::intake::{self, Intake, ReadRequest};
use super::problem::{Name, Problem};
use super::reserve::KeyedRequest;
use super::upstream::{Body, BodyError, PassError};
use crate::record::outcome::Class;
use crate::record::{Caller, Fingerprint, Scope};
use crate::route::{OnUnknown, Route};
use crate::scope::Params;
use crate::telemetry::{Metrics, Would};

/// How many keys are remembered: about 25 MiB.
const KEYS_MAX: usize = 100_000;

/// How long an answer is held back, at most, for the task that reads its request's copy: so that who sends again after
/// the answer is looked at after it.
const JUDGED_WITHIN: Duration = Duration::from_millis(100);

/// The scopes that were seen, by their digests.
#[derive(Default)]
pub(super) struct Memory(Mutex<Option<Cache<[u8; 32], Known>>>);

/// What is known of a scope.
#[derive(Clone)]
struct Known {
    fingerprint: Fingerprint,
    /// A digest, since a token's subject may be long, and names its owner.
    caller: Option<[u8; 32]>,
    begun: Instant,
    ended: Ended,
}

/// How and when an observed request ended; empty until its answer comes, for ever where its caller went away before.
#[derive(Clone, Default)]
pub(super) struct Ended(Arc<OnceLock<(End, Instant)>>);

/// How an observed request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Stored,
    TooLarge,
    Released,
    Unknown,
}

impl End {
    /// As the answer, or its absence, says.
    pub(super) fn of(route: &Route, passed: &Result<Response<Body>, PassError>) -> Self {
        match passed {
            Ok(answer) => match route.outcome.class(answer.status(), answer.headers()) {
                Class::Stored => {
                    let max = u64::try_from(route.policy.response_body_max).unwrap_or(u64::MAX);
                    let longer = intake::declared_length(answer.headers()).is_some_and(|n| n > max);
                    if longer { Self::TooLarge } else { Self::Stored }
                }
                Class::Released => Self::Released,
                Class::Unknown => Self::Unknown,
            },
            // With a body that did not arrive nothing would have been reserved.
            Err(PassError::Unreachable | PassError::Caller | PassError::Crowded) => Self::Released,
            Err(PassError::Failed | PassError::TimedOut) => Self::Unknown,
        }
    }
}

impl Memory {
    /// What would become of a request. The first under its scope is remembered from now on, and how it ends.
    fn meet(&self, route: &Route, request: &KeyedRequest, ended: &Ended, now: Instant) -> Would {
        let (digest, fingerprint) = (digest(&request.scope), request.fingerprint);
        let caller = request.caller.as_ref().map(digest_of_caller);
        let mut seen = self.0.lock();
        let seen = seen.get_or_insert_with(|| Cache::new(KEYS_MAX));
        let would = seen.get(&digest).map_or(Would::Execute, |known| {
            let end = known.ended.0.get().copied();
            let since = end.map_or(known.begun, |(_, at)| at);
            if now.saturating_duration_since(since) >= route.policy.retention {
                return Would::Execute;
            }
            let end = end.map(|(end, _)| end);
            if end == Some(End::Released) {
                return Would::Execute;
            }
            // As where it protects: a stranger does not learn whether it is the same request.
            let stranger = request.readers.differ(caller.as_ref(), known.caller.as_ref());
            if !stranger && !known.fingerprint.same_request(&fingerprint) {
                return Would::Mismatch;
            }
            match end {
                None => Would::Wait,
                Some(End::Stored | End::TooLarge | End::Unknown) if stranger => Would::Forbidden,
                Some(End::Stored) => Would::Replay,
                Some(End::TooLarge) => Would::NotRetained,
                Some(End::Unknown) if route.policy.on_unknown != OnUnknown::Retry => Would::Hold,
                Some(End::Unknown | End::Released) => Would::Execute,
            }
        });
        if would == Would::Execute {
            let ended = ended.clone();
            seen.insert(digest, Known { fingerprint, caller, begun: now, ended });
        }
        would
    }
}

fn digest(scope: &Scope) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in [scope.tenant.as_str(), scope.operation.as_str(), scope.key.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn digest_of_caller(caller: &Caller) -> [u8; 32] {
    Sha256::digest(caller.as_str()).into()
}

/// A copy of a request, to be read once its body is there.
pub(super) struct Copied {
    head: http::request::Parts,
    body: oneshot::Receiver<Bytes>,
}

/// The same request with a body that is copied while it passes, and the copy. `permit`: for the copy.
pub(super) fn copy(
    request: Request<Body>,
    max: usize,
    permit: Permit,
) -> (Request<Body>, Copied, Arc<AtomicBool>) {
    let (head, body) = request.into_parts();
    let (sender, receiver) = oneshot::channel();
    let whole = Arc::new(AtomicBool::new(false));
    let copy = Copy { body: BytesMut::new(), left: max, sender, whole: Arc::clone(&whole), permit };
    let mut tee = Tee { body, copy: Some(copy) };
    tee.look();
    let copied = Copied { head: head.clone(), body: receiver };
    (Request::from_parts(head, tee.boxed_unsync()), copied, whole)
}

/// Reads a copy as keyed requests are read, and reports what would have become of it.
pub(super) async fn judge(
    memory: &Memory,
    intake: &Intake,
    metrics: &Metrics,
    (route, params): (&Arc<Route>, &Params),
    copied: Copied,
    ended: &Ended,
) {
    let Copied { head, body } = copied;
    let Ok(body) = body.await else {
        return report(metrics, route, Would::Unjudged, None, None);
    };
    let body = Full::new(body).map_err(|never| match never {}).boxed_unsync();
    match intake.read(route, params, Request::from_parts(head, body)).await {
        ReadRequest::Keyed(keyed) => {
            let would = memory.meet(route, &keyed.request, ended, Instant::now());
            let key = intake.key_digest(&keyed.request.scope.key);
            report(metrics, route, would, Some(&key), None);
        }
        ReadRequest::Unkeyed(_) => report(metrics, route, Would::Pass, None, None),
        ReadRequest::Refused(problem) => {
            report(metrics, route, refused(&problem), None, Some(&problem))
        }
    }
}

/// What a refusal counts as; what is not named here is told apart by the log.
fn refused(problem: &Problem) -> Would {
    const NAMED: [(Name, Would); 5] = [
        (Name::KeyMissing, Would::KeyMissing),
        (Name::KeyInvalid, Would::KeyInvalid),
        (Name::TenantMissing, Would::TenantMissing),
        (Name::BodyTooLarge, Would::BodyTooLarge),
        (Name::Overloaded, Would::Overloaded),
    ];
    let named = NAMED.iter().find(|(name, _)| *name == problem.name());
    named.map_or(Would::Refuse, |(_, would)| *would)
}

/// Counts and logs. The key as a keyed digest only; what would just be done is no news.
pub(super) fn report(
    metrics: &Metrics,
    route: &Route,
    would: Would,
    key: Option<&str>,
    problem: Option<&Problem>,
) {
    let operation = route.operation.as_str();
    metrics.observed(operation, would);
    let problem = problem.map(|problem| problem.name().as_str());
    let (would, is_news) = (would.as_str(), !matches!(would, Would::Execute | Would::Pass));
    if is_news {
        tracing::info!(operation, would, key, problem, "a request was observed");
    } else {
        tracing::debug!(operation, would, key, "a request was observed");
    }
}

/// The answer of an observed request has come, or never will. `whole`: its body has come.
pub(super) async fn over(ended: &Ended, end: End, judging: JoinHandle<()>, whole: &AtomicBool) {
    // Err: it cannot be over twice.
    ended.0.set((end, Instant::now())).ok();
    if whole.load(Ordering::SeqCst) {
        // Whatever became of the task, the caller gets its answer.
        drop(tokio::time::timeout(JUDGED_WITHIN, judging).await);
    }
}

/// A body that is copied while it passes.
struct Tee {
    body: Body,
    copy: Option<Copy>,
}

struct Copy {
    body: BytesMut,
    /// How many bytes more are copied. One beyond them is enough to know.
    left: usize,
    sender: oneshot::Sender<Bytes>,
    whole: Arc<AtomicBool>,
    permit: Permit,
}

impl Copy {
    /// Whether this is enough.
    fn take(&mut self, data: &Bytes) -> bool {
        let enough = data.len() > self.left;
        let most = data.len().min(self.left.saturating_add(1));
        self.body.extend_from_slice(data.get(..most).unwrap_or_default());
        self.left = self.left.saturating_sub(most);
        enough
    }

    fn send(self) {
        let Self { body, sender, whole, permit, left: _ } = self;
        whole.store(true, Ordering::SeqCst);
        // Whoever reads the copy acquires a permit for it.
        drop(permit);
        // Nobody listens any more where the process is about to end.
        drop(sender.send(body.freeze()));
    }
}

impl Tee {
    /// Sends the copy off once the body has ended.
    fn look(&mut self) {
        if self.body.is_end_stream() {
            self.done();
        }
    }

    fn done(&mut self) {
        if let Some(copy) = self.copy.take() {
            copy.send();
        }
    }
}

impl http_body::Body for Tee {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                let data = frame.data_ref();
                let enough =
                    data.zip(self.copy.as_mut()).is_some_and(|(data, copy)| copy.take(data));
                if enough {
                    self.done();
                }
                self.look();
            }
            None => self.done(),
            // It broke off: there is no whole request to look at.
            Some(Err(_)) => self.copy = None,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
