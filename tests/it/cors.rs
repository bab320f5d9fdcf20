//! Browsers of several origins under one key: who may read a stored answer is said to nobody but whom it was said to.

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};
use http_body_util::Full;

use crate::support::client::{Answer, Ask};
use crate::support::fleet::{order, sending};
use crate::support::orders::{Execution, Orders, created};
use crate::support::process::{self, Gateway, eventually};
use crate::support::rig::{self, Place, Which, on_both_stores};

on_both_stores! {
    a_stored_answer_says_to_no_other_origin_what_the_first_one_may,
    what_a_server_got_first_lets_no_page_read_it_and_a_page_s_answer_says_nothing_to_a_server,
    who_waits_for_an_answer_that_is_not_kept_is_told_nothing_of_the_first_one_s_origin,
    an_answer_of_which_nothing_was_noted_is_for_the_origin_that_it_names,
    an_answer_for_every_origin_stays_one,
    own_headers_are_exposed_to_pages_where_that_is_wanted,
}

const A: &str = "https://a.example";
const B: &str = "https://b.example";

/// An API that allows both origins, each by its name.
fn allowing(execution: &Execution) -> Response<Full<Bytes>> {
    let mut answer = created(execution);
    let headers = answer.headers_mut();
    headers.insert("vary", "Origin".parse().unwrap());
    if let Some(origin) = execution.headers.get("origin") {
        headers.insert("access-control-allow-origin", origin.clone());
        headers.insert("access-control-allow-credentials", "true".parse().unwrap());
        headers.insert("access-control-expose-headers", "Location".parse().unwrap());
    }
    answer
}

async fn before(which: Which, server: &str) -> (Orders, Place, Gateway) {
    let (orders, place) = (Orders::start().await, Place::new(which).await);
    orders.answer(allowing);
    let toml = rig::config(&place, &orders.url(), "")
        .replace("[server]\n", &format!("[server]\n{server}\n"));
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    (orders, place, gateway)
}

fn from(key: &str, origin: &str) -> Ask {
    order(key).header("origin", origin)
}

/// What an answer says to pages.
fn said(answer: &Answer) -> Vec<(String, String)> {
    let cors =
        answer.headers.iter().filter(|(name, _)| name.as_str().starts_with("access-control"));
    cors.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
}

/// The headers of an answer but for those that are about pages, and those of the gateway.
fn others(answer: &Answer) -> HeaderMap {
    let mut headers = answer.headers.clone();
    let away: Vec<_> = headers
        .keys()
        .filter(|name| {
            let name = name.as_str();
            name.starts_with("access-control-") || name == "idempotent-replayed" || name == "date"
        })
        .cloned()
        .collect();
    for name in away {
        headers.remove(name);
    }
    headers
}

async fn a_stored_answer_says_to_no_other_origin_what_the_first_one_may(which: Which) {
    let (orders, _place, mut gateway) = before(which, "").await;
    let first = from("k", A).to(gateway.addr).await;
    assert_eq!((first.status, said(&first).len()), (StatusCode::CREATED, 3));
    for _ in ["from memory", "from the store"] {
        for (asks, allowed) in [(from("k", A), true), (from("k", B), false), (order("k"), false)] {
            let again = asks.to(gateway.addr).await;
            assert!(again.replayed() && again.body == first.body, "{again:?}");
            let expected = if allowed { said(&first) } else { Vec::new() };
            assert_eq!(said(&again), expected, "{asks:?}");
            assert_eq!(others(&again), others(&first), "all else is as it was");
            assert_eq!(again.header("vary"), Some("Origin"));
        }
        gateway.terminate();
        tokio::task::block_in_place(|| gateway.exited());
        gateway = tokio::task::block_in_place(|| gateway.restart());
    }
    assert_eq!(orders.runs(), 1);
}

async fn what_a_server_got_first_lets_no_page_read_it_and_a_page_s_answer_says_nothing_to_a_server(
    which: Which,
) {
    let (orders, _place, gateway) = before(which, "").await;
    assert_eq!(said(&order("k").to(gateway.addr).await).len(), 0);
    for asks in [order("k"), from("k", A)] {
        let again = asks.to(gateway.addr).await;
        assert!(again.replayed() && said(&again).is_empty(), "{again:?}");
    }
    assert_eq!(orders.runs(), 1);
}

async fn who_waits_for_an_answer_that_is_not_kept_is_told_nothing_of_the_first_one_s_origin(
    which: Which,
) {
    let (orders, _place, gateway) = before(which, "").await;
    orders.answer(|execution| {
        let mut answer = allowing(execution);
        *answer.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        answer
    });
    orders.hold();
    let first = sending(from("k", A), gateway.addr);
    orders.asked(1).await;
    let waiters = [sending(from("k", A), gateway.addr), sending(from("k", B), gateway.addr)];
    eventually("both wait", async || {
        crate::support::fleet::metric(gateway.admin, "oncegate_waiting").await == 2
    })
    .await;
    orders.go();
    let first = first.await.unwrap();
    assert_eq!((first.status, said(&first).len()), (StatusCode::TOO_MANY_REQUESTS, 3));
    let [same, other] = waiters;
    let (same, other) = (same.await.unwrap(), other.await.unwrap());
    assert_eq!((same.status, said(&same)), (first.status, said(&first)));
    assert_eq!((other.status, said(&other)), (first.status, Vec::new()));
    assert_eq!(orders.runs(), 1);
}

async fn an_answer_of_which_nothing_was_noted_is_for_the_origin_that_it_names(which: Which) {
    let (orders, _place, gateway) = before(which, "").await;
    orders.answer(|_| Response::builder().status(504).body(Full::default()).unwrap());
    assert_eq!(from("k", A).to(gateway.addr).await.status, StatusCode::GATEWAY_TIMEOUT);
    let record = from("k", A).to(gateway.addr).await.record();
    let config = gateway.config.to_str().unwrap();
    let (code, _, errors) = process::run(&[
        "records",
        "complete",
        &record,
        "--status",
        "201",
        "--body",
        "{}",
        "--header",
        "Vary: Accept-Encoding, Origin",
        "--header",
        &format!("Access-Control-Allow-Origin: {A}"),
        "--config",
        config,
    ]);
    assert_eq!(code, 0, "{errors}");
    for (asks, lines) in [(from("k", A), 1), (from("k", B), 0), (order("k"), 0)] {
        let again = asks.to(gateway.addr).await;
        assert_eq!((again.status, said(&again).len()), (StatusCode::CREATED, lines), "{again:?}");
    }
}

async fn an_answer_for_every_origin_stays_one(which: Which) {
    let (orders, _place, gateway) = before(which, "").await;
    orders.answer(|execution| {
        let mut answer = created(execution);
        answer.headers_mut().insert("vary", "Origin".parse().unwrap());
        answer.headers_mut().insert("access-control-allow-origin", "*".parse().unwrap());
        answer
    });
    let first = from("k", A).to(gateway.addr).await;
    for asks in [from("k", A), from("k", B), order("k")] {
        assert_eq!(said(&asks.to(gateway.addr).await), said(&first));
    }
    assert_eq!(said(&first).len(), 1);
}

async fn own_headers_are_exposed_to_pages_where_that_is_wanted(which: Which) {
    let exposed = |answer: &Answer| {
        let lines = answer.headers.get_all("access-control-expose-headers").iter();
        let mut names: Vec<_> = lines
            .flat_map(|line| line.to_str().unwrap().split(','))
            .map(|name| name.trim().to_ascii_lowercase())
            .collect();
        names.sort();
        names
    };
    let (_orders, _place, gateway) = before(which, "expose_headers = true").await;
    let first = from("k", A).to(gateway.addr).await;
    assert_eq!(exposed(&first), ["location", "oncegate-expires", "oncegate-record"]);
    let again = from("k", A).to(gateway.addr).await;
    let replayed = ["idempotent-replayed", "location", "oncegate-expires", "oncegate-record"];
    assert_eq!(exposed(&again), replayed);
    for asks in [from("k", B), order("k"), order("other")] {
        assert_eq!(exposed(&asks.to(gateway.addr).await), [""; 0], "no page may read it");
    }
    let (_orders, _place, plain) = before(which, "").await;
    for _ in ["first", "again"] {
        assert_eq!(exposed(&from("k", A).to(plain.addr).await), ["location"]);
    }
}
