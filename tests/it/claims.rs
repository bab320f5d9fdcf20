//! Whose an event is while it is being delivered, when the process that has it ends.

use std::time::Duration;

use crate::support::fleet::{order, replicas};
use crate::support::orders::Orders;
use crate::support::process::eventually;
use crate::support::rig::{Place, Which};
use crate::support::sink::{Act, OK, SECRET, Sink};

/// A sink that may take so long that a claim outlasts every test: more than a minute.
fn patient_sink(port: u16) -> String {
    format!(
        r#"
[[sink]]
name = "main"
url = "http://127.0.0.1:{port}/hook"
secret = "{SECRET}"
timeout = "30s"
allow_private = true
"#
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_replica_was_delivering_is_delivered_once_its_lease_has_ended() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let sink = Sink::start(|_, before| if before == 0 { Act::Silence } else { OK }).await;
    let more = patient_sink(sink.port);
    let mut first = replicas(1, &place, &orders.url(), "", &more).remove(0);
    order("k").to(first.addr).await;
    eventually("it is being delivered", async || sink.seen().len() == 1).await;
    let _second = replicas(1, &place, &orders.url(), "", &more).remove(0);
    first.kill9();
    // Long before the claim's own end.
    eventually("the other replica delivers it", async || sink.seen().len() == 2).await;
    let seen = sink.seen();
    assert_eq!((seen[0].id(), &seen[0].body), (seen[1].id(), &seen[1].body));
    let claims = "select claim_no from outbox_done where outcome = 'sent'";
    eventually("it is noted", async || place.rows(claims).await.len() == 1).await;
    assert_eq!(place.count(claims).await, 2, "one claim that was lost, one that was kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_stops_finishes_its_deliveries_before_it_gives_its_lease_back() {
    let (orders, place) = (Orders::start().await, Place::new(Which::Postgres).await);
    let slow = Act::After(Duration::from_secs(2), Box::new(OK));
    let sink = Sink::start(move |_, _| slow.clone()).await;
    let more = patient_sink(sink.port);
    let mut gateways = replicas(2, &place, &orders.url(), "", &more);
    // The other replica may judge once it has known the database for a whole lease.
    let old = "select count(*) from oncegate_owners where started_at < clock_timestamp() - interval '4 seconds'";
    eventually("both have lived for a lease", async || place.count(old).await == 2).await;
    order("k").to(gateways[0].addr).await;
    eventually("it is being delivered", async || sink.seen().len() == 1).await;
    let own =
        "select count(*) from outbox_queue q join idempotency_records r on r.owner = q.claimed_by";
    let by = if place.count(own).await == 1 { 0 } else { 1 };
    gateways[by].terminate();
    assert!(gateways[by].exited().success());
    let sent = "select count(*) from outbox_events where status = 'sent'";
    eventually("it is noted", async || place.count(sent).await == 1).await;
    let live = "select count(*) from oncegate_owners where lease_until > clock_timestamp()";
    assert_eq!(place.count(live).await, 1, "the lease was given back");
    // What the other one has in flight is finished when it stops.
    gateways[1 - by].terminate();
    assert!(gateways[1 - by].exited().success());
    assert_eq!(sink.seen().len(), 1, "nobody else delivered it meanwhile");
}
