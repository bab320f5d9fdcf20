//! Connections that rest: how long a caller may keep one between two requests, and how long it may take for a head.

use std::time::Duration;

use crate::support::process::{self, Gateway};
use crate::support::raw::{End, Raw, header, status};
use crate::support::rig::{self, Place, Which};
use crate::support::upstream::{OK, Reply, Upstream};

const GET: &str = "GET /x HTTP/1.1\r\nHost: a\r\n\r\n";
const SHORT: Duration = Duration::from_millis(500);

/// An API, and a gateway before it with these lines in `[server]`.
async fn gateway(server: &str) -> (Upstream, Place, Gateway) {
    let upstream = Upstream::always(Reply::keep(OK)).await;
    let place = Place::new(Which::Sqlite).await;
    let toml = rig::config(&place, &format!("http://{}", upstream.addr), "");
    let toml = toml.replace("[server]\n", &format!("[server]\n{server}\n"));
    let gateway = Gateway::start(&process::config(place.folder.path(), &toml));
    (upstream, place, gateway)
}

/// A caller whose first request is answered.
async fn answered(gateway: &Gateway) -> Raw {
    let mut raw = Raw::sending(gateway.addr, GET).await;
    assert_eq!(status(&raw.answer().await), 200);
    raw
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_may_rest_longer_than_a_head_may_take() {
    let times = "header_timeout = \"500ms\"\nidle_timeout = \"10m\"";
    let (_upstream, _place, gateway) = gateway(times).await;
    let mut raw = answered(&gateway).await;
    // The rest is what is tested: longer than a head may take.
    tokio::time::sleep(4 * SHORT).await;
    raw.send("\r\n").await;
    tokio::time::sleep(2 * SHORT).await;
    raw.send(GET).await;
    assert_eq!(status(&raw.answer().await), 200);
    // A head that has begun is cut as ever, on this connection and on one that is new.
    raw.send("GET /ne").await;
    for mut raw in [raw, Raw::sending(gateway.addr, "GET /ne").await] {
        let (answer, end) = raw.rest().await;
        assert_eq!((status(&answer), end), (408, End::Fin));
        assert_eq!(header(&answer, "connection").as_deref(), Some("close"));
    }
    // Who has never sent anything does not rest.
    assert_eq!(Raw::connect(gateway.addr).await.rest().await, (String::new(), End::Fin));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_rests_too_long_is_closed_and_a_slow_head_is_not_taken_for_a_rest() {
    let times = "header_timeout = \"10m\"\nidle_timeout = \"2s\"";
    let (_upstream, _place, gateway) = gateway(times).await;
    let mut resting = answered(&gateway).await;
    let mut slow = answered(&gateway).await;
    slow.send("GET /x HTTP/1.1\r\n").await;
    assert_eq!(resting.rest().await, (String::new(), End::Fin), "closed, and nothing said");
    // By now the other one has taken about as long for its head as it may rest; and a moment more.
    tokio::time::sleep(2 * SHORT).await;
    slow.send("Host: a\r\n\r\n").await;
    assert_eq!(status(&slow.answer().await), 200);
}
