//! The lease: live before anything is served, never relied on too long, never renewed once it has ended.

use std::sync::Arc;
use std::time::Duration;

use oncegate::lease;
use oncegate::record::LeaseView;
use oncegate::store::{Error, Heartbeat, Store};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::eventually;
use crate::support::fake::Fake;

const TTL: Duration = Duration::from_secs(15);
const LONG: Duration = Duration::from_secs(60);

async fn begun(store: &Arc<dyn Store>) -> Result<LeaseView, Error> {
    let view = lease::none();
    assert!(!view.holds(view.current().owner, Instant::now().into_std()), "nothing is sent yet");
    lease::begin(store.as_ref(), TTL, &view).await?;
    Ok(view)
}

fn away() -> Result<Heartbeat, Error> {
    Err(Error::Unavailable("away".into()))
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_relied_on_from_before_the_heartbeat_was_sent_less_a_margin() {
    let fake = Arc::new(Fake::default());
    fake.beats.lock().unwrap().push_back((Duration::from_secs(4), Ok(Heartbeat::Renewed)));
    let store: Arc<dyn Store> = fake.clone();
    let sent = Instant::now();
    let view = begun(&store).await.unwrap();
    assert_eq!(sent.elapsed(), Duration::from_secs(4));
    assert_eq!(view.current().sure_until, (sent + Duration::from_secs(12)).into_std());
}

#[tokio::test(start_paused = true)]
async fn without_a_first_heartbeat_there_is_no_lease() {
    let fake = Arc::new(Fake::default());
    fake.beats.lock().unwrap().push_back((Duration::ZERO, away()));
    let store: Arc<dyn Store> = fake;
    assert!(begun(&store).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_ends_no_lease_and_a_hanging_heartbeat_is_sent_again() {
    let fake = Arc::new(Fake::default());
    let store: Arc<dyn Store> = fake.clone();
    let view = begun(&store).await.unwrap();
    let owner = view.current().owner;
    let stop = CancellationToken::new();
    fake.beats.lock().unwrap().extend([
        (Duration::ZERO, away()),
        (Duration::ZERO, away()),
        (LONG, Ok(Heartbeat::Renewed)),
    ]);
    let keeper = tokio::spawn(lease::keep(store, view.clone(), TTL, stop.clone()));
    let end = Instant::now() + LONG;
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(view.holds(owner, Instant::now().into_std()), "at {:?}", end - Instant::now());
    }
    let beats = fake.owners.lock().unwrap().len();
    assert!((12..=16).contains(&beats), "{beats} heartbeats in a minute");
    stop.cancel();
    keeper.await.unwrap();
    assert_eq!(*fake.retired.lock().unwrap(), [owner]);
    assert!(!view.holds(owner, Instant::now().into_std()), "nothing is sent after the end");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_has_ended_is_not_renewed_a_new_owner_goes_on() {
    let fake = Arc::new(Fake::default());
    let store: Arc<dyn Store> = fake.clone();
    let view = begun(&store).await.unwrap();
    let old = view.current().owner;
    fake.beats.lock().unwrap().push_back((Duration::ZERO, Ok(Heartbeat::Ended)));
    let stop = CancellationToken::new();
    let keeper = tokio::spawn(lease::keep(store, view.clone(), TTL, stop.clone()));
    eventually("a new owner", LONG, || view.current().owner != old).await;
    let new = view.current().owner;
    assert!(view.holds(new, Instant::now().into_std()));
    assert!(!view.holds(old, Instant::now().into_std()));
    tokio::time::sleep(TTL).await;
    let owners = fake.owners.lock().unwrap().clone();
    assert!(owners[2..].iter().all(|owner| *owner == new), "{owners:?}");
    stop.cancel();
    keeper.await.unwrap();
}
