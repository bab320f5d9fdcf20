//! Group commit without a timer: what queued while the last commit ran is the next commit.
//!
//! A [`Batcher`] has one worker. It takes whatever waits, at most [`BATCH_MAX`] items and each scope once, and runs
//! them as one statement and one commit; so a lone item waits for nobody and a crowd shares its fsync. What must
//! stay true:
//!
//! - An item that was withdrawn before its batch began is never written, and its caller is told so ([`Error::Late`]).
//! - A batch whose end is not known is run again with the same ids until it is known, or until its callers'
//!   deadlines have passed; once in doubt, an item never becomes "not done" by a later failure to connect.
//! - A batch that was rolled back for the sake of others (a deadlock, a serialization failure) is run again while there is time
//!   for it before its callers' deadlines, and between two runs it is not done: who stops waiting then is not in doubt.
//! - A batch that the database refuses is halved until the bad item stands alone; it alone fails. Where an earlier run of it
//!   may have committed, it is in doubt all the same.

use std::collections::{HashSet, VecDeque};
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};

use super::Error;
use crate::backoff::Backoff;
use crate::fault::{self, Injected, Point};
use crate::record::Scope;
use crate::telemetry::causes;

/// Most items in one statement. More did not help in measurements, and makes a halving dearer.
pub const BATCH_MAX: usize = 64;

/// Most items that may wait for one worker; beyond it the database counts as unavailable.
const QUEUE_MAX: usize = 8192;

/// Pauses before a batch whose end is in doubt is run again.
const RETRIES: Backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(250));

/// What a batch is made of, and how it is run.
#[async_trait]
pub trait Work: Send + Sync + 'static {
    /// One item.
    type Item: Send + Sync + 'static;
    /// Its result.
    type Reply: Send + 'static;

    /// The scope that may stand in a batch only once.
    fn scope(item: &Self::Item) -> &Scope;

    /// Runs all items in one commit; one reply each, in their order. Running it again must be safe.
    async fn run(&self, items: &[Arc<Self::Item>]) -> Result<Vec<Self::Reply>, RunError>;
}

/// Why a run failed, by what the worker does about it.
#[derive(Debug)]
pub enum RunError {
    /// A deadlock or a serialization failure: nothing was changed, again at once.
    Again(Error),
    /// Anything else, as the callers will see it.
    Failed(Error),
    /// What followed a commit of these items failed: their end is in doubt until a run of them succeeds.
    Committed(Error),
}

impl RunError {
    /// For callers outside a batch, who do not repeat.
    #[must_use]
    pub fn into_error(self) -> Error {
        match self {
            Self::Again(error) | Self::Failed(error) | Self::Committed(error) => error,
        }
    }
}

impl From<Error> for RunError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The permit to run a batch, of which two batchers of one database share one: while one runs its batch the other's queue
/// fills, so that both have larger batches and the database has less to do. It is waited for as long as a batch usually takes
/// and no longer: a statement that hangs in one never holds the other up. Clones are one permit.
#[derive(Clone)]
pub struct BatchPermit(Arc<Semaphore>);

/// How long the permit is waited for.
const PERMIT_WAIT_MAX: Duration = Duration::from_millis(5);

impl Default for BatchPermit {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl BatchPermit {
    /// The permit; `None`: the other did not end in time.
    async fn acquire(&self) -> Option<SemaphorePermit<'_>> {
        tokio::time::timeout(PERMIT_WAIT_MAX, self.0.acquire()).await.ok()?.ok()
    }
}

/// Why nothing is done any more.
const ENDED: &str = "the store's worker has ended: restart the process";

const QUEUED: u8 = 0;
const BEGUN: u8 = 1;
const WITHDRAWN: u8 = 2;

struct Job<W: Work> {
    item: Arc<W::Item>,
    deadline: Instant,
    stage: Arc<AtomicU8>,
    reply: oneshot::Sender<Result<W::Reply, Error>>,
}

impl<W: Work> Job<W> {
    /// It is run now, unless its caller has stopped waiting.
    fn begins(&self) -> bool {
        let begun = self.stage.compare_exchange(QUEUED, BEGUN, Ordering::AcqRel, Ordering::Acquire);
        begun.is_ok()
    }
}

/// The queue of one kind of work, in front of its one worker.
pub struct Batcher<W: Work> {
    queue: mpsc::Sender<Job<W>>,
}

impl<W: Work> Batcher<W> {
    /// A queue, and its worker as a future for the caller to spawn. The worker ends when the queue is dropped and drained.
    pub fn new(work: W, permit: BatchPermit) -> (Self, impl Future<Output = ()> + Send) {
        let (queue, jobs) = mpsc::channel(QUEUE_MAX);
        (Self { queue }, work_off(work, jobs, permit))
    }

    /// Whether there is still a worker. One that panicked never comes back: the process must be replaced.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where it has ended.
    pub fn works(&self) -> Result<(), Error> {
        if self.queue.is_closed() {
            return Err(Error::Unavailable(ENDED.into()));
        }
        Ok(())
    }

    /// Queues an item and waits for its batch, until `deadline`.
    ///
    /// # Errors
    /// [`Error::Late`] where the deadline passed before the item's batch began, or between two runs of it of which the first
    /// did nothing; [`Error::InDoubt`] where it passed while it ran; whatever the batch itself failed with.
    pub async fn submit(&self, item: W::Item, deadline: Instant) -> Result<W::Reply, Error> {
        self.submit_shared(Arc::new(item), deadline).await
    }

    /// As [`Batcher::submit`], for an item that may have to be submitted again.
    ///
    /// # Errors
    /// The same.
    pub async fn submit_shared(
        &self,
        item: Arc<W::Item>,
        deadline: Instant,
    ) -> Result<W::Reply, Error> {
        let (reply, answer) = oneshot::channel();
        let stage = Arc::new(AtomicU8::new(QUEUED));
        // Kept until the answer is here, so that what the item holds is freed by the thread that made it: a worker that
        // frees everybody's memory takes the allocator's locks of all others.
        let kept = Arc::clone(&item);
        let job = Job { item, deadline, stage: Arc::clone(&stage), reply };
        self.queue.try_send(job).map_err(|refused| {
            let why = match refused {
                TrySendError::Full(_) => "the store's queue is full",
                TrySendError::Closed(_) => ENDED,
            };
            Error::Unavailable(why.into())
        })?;
        let withdraw = Withdraw(&stage);
        let answered = tokio::time::timeout_at(deadline.into(), answer).await;
        drop(kept);
        match answered {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::InDoubt(ENDED.into())),
            Err(_) if withdraw.withdraw() => Err(Error::Late),
            Err(_) => Err(Error::InDoubt("the deadline passed while the statement ran".into())),
        }
    }
}

/// Withdraws an item that is still queued when its caller stops waiting, also by being dropped.
struct Withdraw<'a>(&'a AtomicU8);

impl Withdraw<'_> {
    fn withdraw(&self) -> bool {
        let swap = self.0.compare_exchange(QUEUED, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire);
        swap.is_ok() || swap == Err(WITHDRAWN)
    }
}

impl Drop for Withdraw<'_> {
    fn drop(&mut self) {
        self.withdraw();
    }
}

async fn work_off<W: Work>(work: W, mut jobs: mpsc::Receiver<Job<W>>, permit: BatchPermit) {
    let mut waiting: VecDeque<Job<W>> = VecDeque::new();
    loop {
        if waiting.is_empty() {
            match jobs.recv().await {
                Some(job) => waiting.push_back(job),
                None => return,
            }
        }
        let _permit = permit.acquire().await;
        gather(&mut jobs, &mut waiting).await;
        let batch = next_batch(&mut waiting);
        if !batch.is_empty() {
            run_batch(&work, batch).await;
        }
    }
}

/// Takes over what has queued, and lets what is ready to run queue as well: on a busy runtime each turn brings more, on
/// an idle one none, and a lone item goes at once. There is no timer.
async fn gather<W: Work>(jobs: &mut mpsc::Receiver<Job<W>>, waiting: &mut VecDeque<Job<W>>) {
    loop {
        let before = waiting.len();
        tokio::task::yield_now().await;
        while waiting.len() < QUEUE_MAX
            && let Ok(job) = jobs.try_recv()
        {
            waiting.push_back(job);
        }
        if waiting.len() == before || waiting.len() >= BATCH_MAX {
            return;
        }
    }
}

/// Takes the next batch off the front: each scope once (a second item of one scope waits for the next batch), and
/// nothing that was withdrawn.
fn next_batch<W: Work>(waiting: &mut VecDeque<Job<W>>) -> Vec<Job<W>> {
    let mut batch: Vec<Job<W>> = Vec::new();
    // Two scopes of one hash would share no batch, which does no harm.
    let (hasher, mut scopes) = (RandomState::new(), HashSet::new());
    let mut later = VecDeque::new();
    while batch.len() < BATCH_MAX {
        let Some(job) = waiting.pop_front() else { break };
        let scope = hasher.hash_one(W::scope(&job.item));
        if scopes.contains(&scope) {
            later.push_back(job);
            continue;
        }
        if job.begins() {
            scopes.insert(scope);
            batch.push(job);
        }
    }
    while let Some(job) = later.pop_back() {
        waiting.push_front(job);
    }
    batch
}

/// Runs a batch to its end. Halves it on refused data; runs it again while its end is in doubt.
async fn run_batch<W: Work>(work: &W, batch: Vec<Job<W>>) {
    let mut pieces = vec![(batch, false)];
    while let Some((mut piece, mut doubt)) = pieces.pop() {
        let Some(result) = run_until_known(work, &mut piece, &mut doubt).await else { continue };
        match result {
            Ok(replies) => {
                for (job, reply) in piece.into_iter().zip(replies) {
                    answer(job, Ok(reply));
                }
            }
            Err(Error::Refused(_) | Error::Unreadable(_)) if piece.len() > 1 => {
                let half = piece.split_off(piece.len() / 2);
                pieces.extend([(piece, doubt), (half, doubt)]);
            }
            // Refused now, and perhaps not by an earlier run.
            Err(error) if doubt => fail_all(piece, &Error::InDoubt(chain(&error).into())),
            Err(error) => fail_all(piece, &error),
        }
    }
}

/// Runs a piece until its end is known. Jobs whose deadline passes meanwhile are answered and leave the piece;
/// `None` where none is left. `doubt`: an earlier run of these items may have committed.
async fn run_until_known<W: Work>(
    work: &W,
    piece: &mut Vec<Job<W>>,
    doubt: &mut bool,
) -> Option<Result<Vec<W::Reply>, Error>> {
    let mut retries = RETRIES;
    loop {
        let items: Vec<_> = piece.iter().map(|job| Arc::clone(&job.item)).collect();
        let begun = Instant::now();
        let error = match run_once(work, &items).await {
            Ok(replies) => return Some(Ok(replies)),
            Err(RunError::Again(error)) => error,
            Err(RunError::Failed(error @ Error::InDoubt(_))) => {
                *doubt = true;
                error
            }
            Err(RunError::Committed(error)) => {
                *doubt = true;
                if is_one_items(&error) {
                    return Some(Err(error));
                }
                error
            }
            Err(RunError::Failed(error)) if *doubt && !is_one_items(&error) => error,
            Err(RunError::Failed(error)) => return Some(Err(error)),
        };
        let pausing = retries.pause();
        if *doubt {
            tokio::time::sleep(pausing).await;
            let now = Instant::now();
            for job in piece.extract_if(.., |job| job.deadline <= now) {
                answer(job, Err(in_doubt(&error)));
            }
        } else {
            let took = begun.elapsed();
            wait_undone(piece, &error, pausing, took).await;
        }
        if piece.is_empty() {
            return None;
        }
    }
}

/// Waits between two runs of a piece of which nothing was done: its jobs may be withdrawn meanwhile. Those with no time for
/// another run as long as the last one are told at once.
async fn wait_undone<W: Work>(
    piece: &mut Vec<Job<W>>,
    error: &Error,
    pausing: Duration,
    took: Duration,
) {
    let over = Instant::now() + pausing + took;
    for job in piece.extract_if(.., |job| job.deadline <= over) {
        answer(job, Err(unavailable(error)));
    }
    piece.iter().for_each(|job| job.stage.store(QUEUED, Ordering::Release));
    tokio::time::sleep(pausing).await;
    piece.retain(Job::begins);
}

/// Whether one of the items makes the whole batch fail, and the others would not.
fn is_one_items(error: &Error) -> bool {
    matches!(error, Error::Refused(_) | Error::Unreadable(_))
}

/// One run, with its fault points: before it nothing is written, after it nobody has been told.
async fn run_once<W: Work>(work: &W, items: &[Arc<W::Item>]) -> Result<Vec<W::Reply>, RunError> {
    let unchanged = |fault: Injected| Error::Unavailable(fault.into());
    let untold = |fault: Injected| Error::InDoubt(fault.into());
    fault::fallible(Point::BatchBegun).await.map_err(unchanged)?;
    let replies = work.run(items).await?;
    fault::fallible(Point::BatchCommitted).await.map_err(untold)?;
    Ok(replies)
}

fn answer<W: Work>(job: Job<W>, result: Result<W::Reply, Error>) {
    let Job { item, stage, reply, .. } = job;
    drop((item, stage));
    // A caller that stopped waiting has been told that its item is in doubt, and finds out by asking again.
    drop(reply.send(result));
}

fn fail_all<W: Work>(jobs: Vec<Job<W>>, error: &Error) {
    for job in jobs {
        answer(job, Err(copy(error)));
    }
}

fn in_doubt(error: &Error) -> Error {
    Error::InDoubt(chain(error).into())
}

fn unavailable(error: &Error) -> Error {
    Error::Unavailable(chain(error).into())
}

/// One error for each caller of a batch: causes are not `Clone`, so their text is carried on.
fn copy(error: &Error) -> Error {
    match error {
        Error::Unavailable(_) => unavailable(error),
        Error::InDoubt(_) => in_doubt(error),
        Error::Refused(_) => Error::Refused(chain(error).into()),
        Error::Unreadable(_) => Error::Unreadable(chain(error).into()),
        Error::Late => Error::Late,
    }
}

/// The texts of an error's causes, joined.
fn chain(error: &Error) -> String {
    std::error::Error::source(error).map(causes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::sync::Notify;

    use super::*;
    use crate::record::{Key, Operation, Tenant};

    #[derive(Debug)]
    struct Item {
        scope: Scope,
        bad: bool,
    }

    fn item(key: &str) -> Item {
        let scope = Scope {
            tenant: Tenant::stored("t"),
            operation: Operation::stored("o"),
            key: Key::stored(key),
        };
        Item { scope, bad: false }
    }

    /// Plays a database: keeps what it was asked to run, fails as told, and can be held at the start of a run.
    #[derive(Default)]
    struct Fake {
        runs: Mutex<Vec<Vec<String>>>,
        failures: Mutex<VecDeque<RunError>>,
        always: Mutex<Option<fn() -> RunError>>,
        held: Mutex<Option<Arc<Notify>>>,
        begun: Notify,
    }

    impl Fake {
        fn runs(&self) -> Vec<Vec<String>> {
            self.runs.lock().unwrap().clone()
        }

        fn fail_once(&self, error: RunError) {
            self.failures.lock().unwrap().push_back(error);
        }

        fn hold(&self) -> Arc<Notify> {
            let gate = Arc::new(Notify::new());
            *self.held.lock().unwrap() = Some(Arc::clone(&gate));
            gate
        }
    }

    struct Work(Arc<Fake>);

    #[async_trait]
    impl super::Work for Work {
        type Item = Item;
        type Reply = String;

        fn scope(item: &Item) -> &Scope {
            &item.scope
        }

        async fn run(&self, items: &[Arc<Item>]) -> Result<Vec<String>, RunError> {
            let keys: Vec<_> = items.iter().map(|item| item.scope.key.to_string()).collect();
            self.0.runs.lock().unwrap().push(keys.clone());
            self.0.begun.notify_one();
            // How a run ends is settled before it is held, so that a test can prepare the next one meanwhile.
            let failure = self.0.failures.lock().unwrap().pop_front();
            let failure = failure.or_else(|| self.0.always.lock().unwrap().map(|error| error()));
            let gate = self.0.held.lock().unwrap().take();
            if let Some(gate) = gate {
                gate.notified().await;
            }
            if let Some(error) = failure {
                return Err(error);
            }
            if items.iter().any(|item| item.bad) {
                return Err(Error::Refused("bad".into()).into());
            }
            Ok(keys)
        }
    }

    fn start() -> (Arc<Fake>, Arc<Batcher<Work>>) {
        let fake = Arc::new(Fake::default());
        let (batcher, worker) = Batcher::new(Work(Arc::clone(&fake)), BatchPermit::default());
        tokio::spawn(worker);
        (fake, Arc::new(batcher))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    type Submitted = tokio::task::JoinHandle<Result<String, Error>>;

    fn submit(batcher: &Arc<Batcher<Work>>, item: Item, deadline: Instant) -> Submitted {
        let batcher = Arc::clone(batcher);
        tokio::spawn(async move { batcher.submit(item, deadline).await })
    }

    /// Lets spawned tasks reach their first wait: on a runtime of one thread they run in order.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    fn doubt() -> RunError {
        RunError::Failed(Error::InDoubt("lost".into()))
    }

    fn unavailable() -> RunError {
        RunError::Failed(Error::Unavailable("gone".into()))
    }

    #[tokio::test]
    async fn a_lone_item_waits_for_nobody() {
        let (fake, batcher) = start();
        assert_eq!(batcher.submit(item("a"), soon()).await.unwrap(), "a");
        assert_eq!(fake.runs(), [["a"]]);
    }

    #[tokio::test]
    async fn what_queued_while_a_batch_ran_is_the_next_batch_and_each_gets_its_own_reply() {
        let (fake, batcher) = start();
        let gate = fake.hold();
        let first = submit(&batcher, item("first"), soon());
        fake.begun.notified().await;
        let keys: Vec<String> = (0..BATCH_MAX + 1).map(|n| format!("k{n}")).collect();
        let waiting: Vec<_> = keys.iter().map(|key| submit(&batcher, item(key), soon())).collect();
        settle().await;
        gate.notify_one();
        first.await.unwrap().unwrap();
        for (key, task) in keys.iter().zip(waiting) {
            assert_eq!(&task.await.unwrap().unwrap(), key);
        }
        let sizes: Vec<_> = fake.runs().iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, BATCH_MAX, 1]);
    }

    #[tokio::test]
    async fn a_worker_that_panicked_is_known_to_have_ended_and_its_item_is_in_doubt() {
        struct Panics;
        #[async_trait]
        impl super::Work for Panics {
            type Item = Item;
            type Reply = ();
            fn scope(item: &Item) -> &Scope {
                &item.scope
            }
            async fn run(&self, _: &[Arc<Item>]) -> Result<Vec<()>, RunError> {
                panic!("as a bug would")
            }
        }
        let (batcher, worker) = Batcher::new(Panics, BatchPermit::default());
        let worker = tokio::spawn(worker);
        batcher.works().unwrap();
        let told = batcher.submit(item("a"), soon()).await.unwrap_err();
        assert!(matches!(told, Error::InDoubt(_)), "{told:?}");
        assert!(worker.await.unwrap_err().is_panic());
        assert!(batcher.works().is_err());
        let refused = batcher.submit(item("b"), soon()).await.unwrap_err();
        assert!(matches!(refused, Error::Unavailable(_)), "{refused:?}");
    }

    #[tokio::test]
    async fn batchers_take_turns_but_one_that_hangs_holds_nobody_up() {
        let permit = BatchPermit::default();
        let (hanging, free) = (Arc::new(Fake::default()), Arc::new(Fake::default()));
        let (first, worker) = Batcher::new(Work(Arc::clone(&hanging)), permit.clone());
        tokio::spawn(worker);
        let (second, worker) = Batcher::new(Work(Arc::clone(&free)), permit.clone());
        tokio::spawn(worker);
        let gate = hanging.hold();
        let hung = submit(&Arc::new(first), item("hung"), soon());
        hanging.begun.notified().await;
        assert!(permit.0.try_acquire().is_err(), "whoever runs a batch has the permit");
        second.submit(item("free"), soon()).await.unwrap();
        gate.notify_one();
        hung.await.unwrap().unwrap();
        settle().await;
        assert!(permit.0.try_acquire().is_ok(), "and gives it back");
    }

    #[tokio::test]
    async fn a_batch_holds_a_scope_once_and_keeps_the_order_within_it() {
        let (fake, batcher) = start();
        let gate = fake.hold();
        let first = submit(&batcher, item("first"), soon());
        fake.begun.notified().await;
        let twins: Vec<_> =
            ["a", "a", "b", "a"].map(|key| submit(&batcher, item(key), soon())).into();
        settle().await;
        gate.notify_one();
        first.await.unwrap().unwrap();
        for twin in twins {
            twin.await.unwrap().unwrap();
        }
        assert_eq!(fake.runs(), [vec!["first"], vec!["a", "b"], vec!["a"], vec!["a"]]);
    }

    #[tokio::test]
    async fn an_item_that_was_withdrawn_before_its_batch_is_never_run() {
        let (fake, batcher) = start();
        let gate = fake.hold();
        let first = submit(&batcher, item("first"), soon());
        fake.begun.notified().await;
        let late = batcher.submit(item("late"), Instant::now()).await;
        assert!(matches!(late, Err(Error::Late)), "{late:?}");
        let dropped = submit(&batcher, item("dropped"), soon());
        settle().await;
        dropped.abort();
        assert!(dropped.await.unwrap_err().is_cancelled());
        gate.notify_one();
        first.await.unwrap().unwrap();
        batcher.submit(item("next"), soon()).await.unwrap();
        assert_eq!(fake.runs(), [["first"], ["next"]]);
    }

    #[tokio::test]
    async fn a_deadline_that_passes_while_the_statement_runs_leaves_doubt() {
        let (fake, batcher) = start();
        let gate = fake.hold();
        let deadline = Instant::now() + Duration::from_millis(30);
        let result = batcher.submit(item("a"), deadline).await;
        assert!(matches!(result, Err(Error::InDoubt(_))), "{result:?}");
        gate.notify_one();
        batcher.submit(item("b"), soon()).await.unwrap();
    }

    #[tokio::test]
    async fn refused_data_is_isolated_by_halving_and_alone_fails() {
        let (fake, batcher) = start();
        let gate = fake.hold();
        let first = submit(&batcher, item("first"), soon());
        fake.begun.notified().await;
        let tasks: Vec<_> = (0..9)
            .map(|n| {
                let bad = n == 5;
                (bad, submit(&batcher, Item { bad, ..item(&n.to_string()) }, soon()))
            })
            .collect();
        settle().await;
        gate.notify_one();
        first.await.unwrap().unwrap();
        for (bad, task) in tasks {
            let result = task.await.unwrap();
            assert_eq!(matches!(result, Err(Error::Refused(_))), bad, "{result:?}");
            assert_eq!(result.is_ok(), !bad);
        }
    }

    #[tokio::test]
    async fn a_batch_in_doubt_is_run_again_until_it_is_known() {
        let (fake, batcher) = start();
        fake.fail_once(doubt());
        fake.fail_once(unavailable());
        fake.fail_once(RunError::Again(Error::Unavailable("deadlock".into())));
        assert_eq!(batcher.submit(item("a"), soon()).await.unwrap(), "a");
        assert_eq!(fake.runs().len(), 4);
    }

    #[tokio::test]
    async fn doubt_never_becomes_not_done_by_a_later_failure_to_connect() {
        let (fake, batcher) = start();
        fake.fail_once(doubt());
        *fake.always.lock().unwrap() = Some(unavailable);
        let deadline = Instant::now() + Duration::from_millis(50);
        let result = batcher.submit(item("a"), deadline).await;
        assert!(matches!(result, Err(Error::InDoubt(_))), "{result:?}");
    }

    fn deadlock() -> RunError {
        RunError::Again(Error::Unavailable("deadlock".into()))
    }

    #[tokio::test]
    async fn what_is_rolled_back_again_and_again_is_not_done_by_the_deadline() {
        let (fake, batcher) = start();
        *fake.always.lock().unwrap() = Some(deadlock);
        let deadline = Instant::now() + Duration::from_millis(300);
        let result = batcher.submit(item("a"), deadline).await;
        assert!(matches!(result, Err(Error::Unavailable(_) | Error::Late)), "{result:?}");
        assert!(fake.runs().len() > 1, "as often as there was time");
    }

    #[tokio::test(start_paused = true)]
    async fn who_stops_waiting_between_two_runs_is_not_in_doubt_and_is_not_run_again() {
        let (fake, batcher) = start();
        let gate = fake.hold();
        let first = submit(&batcher, item("first"), soon());
        fake.begun.notified().await;
        let gone = submit(&batcher, item("gone"), soon());
        let other = submit(&batcher, item("other"), soon());
        settle().await;
        fake.fail_once(deadlock());
        gate.notify_one();
        first.await.unwrap().unwrap();
        settle().await;
        assert_eq!(fake.runs(), [vec!["first"], vec!["gone", "other"]]);
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        other.await.unwrap().unwrap();
        assert_eq!(fake.runs()[2..], [["other"]]);
    }

    #[tokio::test]
    async fn doubt_outlives_a_halving() {
        let (fake, batcher) = start();
        let gate = fake.hold();
        let first = submit(&batcher, item("first"), soon());
        fake.begun.notified().await;
        let deadline = Instant::now() + Duration::from_millis(200);
        let both = ["a", "b"].map(|key| submit(&batcher, item(key), deadline));
        settle().await;
        fake.fail_once(doubt());
        fake.fail_once(RunError::Failed(Error::Refused("for now".into())));
        *fake.always.lock().unwrap() = Some(unavailable);
        gate.notify_one();
        first.await.unwrap().unwrap();
        for task in both {
            let result = task.await.unwrap();
            assert!(matches!(result, Err(Error::InDoubt(_))), "{result:?}");
        }
    }

    #[tokio::test]
    async fn what_is_refused_after_a_doubt_is_in_doubt() {
        let (fake, batcher) = start();
        fake.fail_once(doubt());
        fake.fail_once(RunError::Failed(Error::Refused("now".into())));
        let result = batcher.submit(item("a"), soon()).await;
        assert!(matches!(result, Err(Error::InDoubt(_))), "{result:?}");
        fake.fail_once(RunError::Committed(Error::Refused("what follows".into())));
        let result = batcher.submit(item("b"), soon()).await;
        assert!(matches!(result, Err(Error::InDoubt(_))), "{result:?}");
    }

    #[tokio::test]
    async fn what_follows_a_commit_is_run_again_until_it_is_known() {
        let (fake, batcher) = start();
        fake.fail_once(RunError::Committed(Error::Unavailable("reading".into())));
        assert_eq!(batcher.submit(item("a"), soon()).await.unwrap(), "a");
        assert_eq!(fake.runs().len(), 2);
    }

    #[tokio::test]
    async fn a_failure_to_connect_fails_at_once_and_says_that_nothing_was_done() {
        let (fake, batcher) = start();
        fake.fail_once(unavailable());
        let result = batcher.submit(item("a"), soon()).await;
        assert!(matches!(result, Err(Error::Unavailable(_))), "{result:?}");
        assert_eq!(fake.runs().len(), 1);
    }
}
