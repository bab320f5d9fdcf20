//! The acceptance cases of the relay: R11 to R13, against the real program, with relays that are killed.

use std::collections::HashSet;

use futures_util::{StreamExt, stream};
use http::StatusCode;

use crate::support::fleet::{self, TWO_EVENTS, order};
use crate::support::orders::Orders;
use crate::support::process::{self, eventually};
use crate::support::rig::{Place, Rig, Which, on_both_stores};
use crate::support::sink::{Act, OK, Seen, Sink};

on_both_stores! {
    r11_an_event_that_was_published_and_not_noted_comes_again_under_its_id,
    r12_several_relay_workers_deliver_each_event_once,
    r13_an_event_whose_sending_failed_is_delivered_later,
}

/// A consumer as the documents ask for it: what it has seen under an id has no second effect.
fn side_effects(seen: &[Seen]) -> usize {
    let mut known = HashSet::new();
    seen.iter().filter(|delivery| known.insert(delivery.id())).count()
}

async fn r11_an_event_that_was_published_and_not_noted_comes_again_under_its_id(which: Which) {
    // The first delivery arrives, and the relay never hears so.
    let sink = Sink::start(|_, before| if before == 0 { Act::Silence } else { OK }).await;
    let mut rig = Rig::start(which, &fleet::sink(sink.port)).await;
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    eventually("the sink has the delivery", async || !sink.seen().is_empty()).await;
    rig.gateway.kill9();
    let owed = "select count(*) from outbox_events where status = 'pending' and attempts = 0";
    assert_eq!(rig.place.count(owed).await, 1, "killed before it was noted");

    rig.gateway = rig.gateway.restart();
    let sent = "select count(*) from outbox_events where status = 'sent' and sent_at is not null";
    eventually("it is noted", async || rig.place.count(sent).await == 1).await;
    let seen = sink.seen();
    assert_eq!(seen.len(), 2, "at least once");
    assert_eq!(seen[0].id(), seen[1].id(), "the same event id");
    assert_eq!(seen[0].body, seen[1].body, "the same body");
    assert!(seen.iter().all(|delivery| delivery.verified), "each with a valid signature");
    assert_eq!(side_effects(&seen), 1);
    assert_eq!(rig.place.events().await, 1);
}

async fn r12_several_relay_workers_deliver_each_event_once(which: Which) {
    const EVENTS: usize = 300;
    let (orders, place, sink) =
        (Orders::start().await, Place::new(which).await, Sink::start(|_, _| OK).await);
    let relays = if which == Which::Postgres { 3 } else { 1 };
    // Nobody is shot here: a claim of a busy machine must not run out.
    let patient = fleet::sink(sink.port).replace("timeout = \"2s\"", "timeout = \"20s\"");
    let gateways = fleet::replicas(relays, &place, &orders.url(), "", &patient);
    let asks = (0..EVENTS).map(|n| {
        let to = gateways[n % relays].addr;
        async move { order(&format!("key-{n}")).to(to).await.status }
    });
    let statuses: Vec<_> = stream::iter(asks).buffer_unordered(24).collect().await;
    assert!(statuses.iter().all(|status| *status == StatusCode::CREATED));
    let sent = "select count(*) from outbox_events where status = 'sent'";
    eventually("all are delivered", async || place.count(sent).await == EVENTS as i64).await;

    let seen = sink.seen();
    assert_eq!(side_effects(&seen), EVENTS, "none is lost");
    assert_eq!(seen.len(), EVENTS, "none is delivered twice");
    assert!(seen.iter().all(|delivery| delivery.verified));
    let mut shares = Vec::new();
    for gateway in &gateways {
        let text = crate::support::client::get("/metrics").to(gateway.admin).await.body;
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines = text.lines().filter(|line| line.starts_with("oncegate_deliveries_total"));
        shares.push(
            lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>(),
        );
    }
    assert_eq!(shares.iter().sum::<f64>() as usize, EVENTS, "{shares:?}");
    assert!(shares.iter().all(|share| *share > 0.0), "the relays share the work: {shares:?}");
}

async fn r13_an_event_whose_sending_failed_is_delivered_later(which: Which) {
    let port = process::free_port();
    let more = format!("{TWO_EVENTS}{}", fleet::sink(port));
    let rig = Rig::start(which, &more).await;
    // Nobody listens there, and the caller is not concerned.
    assert_eq!(order("k").to(rig.gateway.addr).await.status, StatusCode::CREATED);
    let failed =
        "select count(*) from outbox_events where status = 'pending' and last_error is not null";
    eventually("sending failed", async || rig.place.count(failed).await > 0).await;
    assert_eq!(rig.place.events().await, 2, "both events are still there");

    let sink = Sink::on(port, |_, _| OK).await;
    let sent = "select count(*) from outbox_events where status = 'sent'";
    eventually("both are delivered", async || rig.place.count(sent).await == 2).await;
    assert_eq!(sink.ids().len(), 2);
    assert!(sink.seen().iter().all(|delivery| delivery.verified));
}
