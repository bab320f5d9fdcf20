//! Dead events: seen, sent again and given up, by command and over the admin listener, one at a time and very many at once.

use std::time::{Duration, Instant};

use oncegate::record::OwnerId;
use oncegate::store::postgres::Postgres;
use oncegate::store::{
    Acknowledgement, Chosen, Claim, DeadFilter, Lane, Look, Operator, Order, Reclaim, Store,
    Verdict,
};
use serde_json::Value;
use tokio::sync::watch;
use uuid::Uuid;

use crate::support::client::post;
use crate::support::fleet::{self, command, order};
use crate::support::process::{Gateway, eventually};
use crate::support::rig::{Place, Rig, Which, on_both_stores};
use crate::support::sink::{Act, OK, Sink};

on_both_stores! {
    dead_events_are_seen_sent_again_and_given_up_by_operators,
    f55_very_many_dead_events_are_redelivered_once_though_asked_for_twice,
}

fn json(gateway: &Gateway, args: &[&str]) -> (i32, Value) {
    let (code, out, errors) = command(gateway, &[args, &["--json"]].concat());
    let read = serde_json::from_str(&out);
    (code, read.unwrap_or_else(|error| panic!("{args:?}: {error}: {out}{errors}")))
}

/// Who did what why, and with which count or status.
async fn audit(place: &Place) -> Vec<(String, Option<String>, Value)> {
    let sql = "select action, why, detail from audit_log where action like 'event.%' order by at";
    let rows = place.rows(sql).await.into_iter();
    rows.map(|row| {
        let [action, why, detail] = row.try_into().unwrap();
        (action.unwrap(), why, serde_json::from_str(&detail.unwrap()).unwrap())
    })
    .collect()
}

async fn dead_events_are_seen_sent_again_and_given_up_by_operators(which: Which) {
    let (open, gate) = watch::channel(false);
    // Refuses the first three, holds the one that says so, takes the others.
    let sink = Sink::start(move |seen, before| match before {
        0..3 => Act::Answer(500, ""),
        _ if seen.text().contains("held") => Act::When(gate.clone(), Box::new(OK)),
        _ => OK,
    })
    .await;
    let patient = fleet::sink(sink.port).replace("\"2s\"", "\"20s\"");
    let more = format!("{patient}max_attempts = 1\nmax_age = \"0s\"\n");
    let rig = Rig::start(which, &more).await;
    for n in 0..3 {
        order(&format!("k-{n}")).to(rig.gateway.addr).await;
    }
    let dead = "select count(*) from outbox_events where status = 'dead'";
    eventually("all are dead", async || rig.place.count(dead).await == 3).await;

    let (code, list) = json(&rig.gateway, &["events", "list", "--status", "dead"]);
    let events = list["events"].as_array().unwrap();
    assert_eq!((code, events.len()), (0, 3));
    let ids: Vec<&str> = events.iter().map(|event| event["id"].as_str().unwrap()).collect();
    for event in events {
        assert_eq!(event["sink"], "main");
        assert!(event["last_error"].as_str().unwrap().contains("500"), "{event}");
        assert!(event["age_seconds"].as_u64().is_some_and(|age| age < 60), "{event}");
    }
    let (_, shown) = json(&rig.gateway, &["events", "show", ids[0]]);
    assert_eq!(
        (&shown["attempts"][0]["status"], &shown["attempts"][1]),
        (&500.into(), &Value::Null)
    );

    let why = ["--reason", "the consumer was wrong"];
    let (code, done) = json(&rig.gateway, &[&["events", "discard", ids[0]][..], &why].concat());
    assert_eq!((code, &done["discarded"]), (0, &1.into()));
    let (_, dry) = json(&rig.gateway, &["events", "redeliver", "--status", "dead", "--dry-run"]);
    assert_eq!(dry["redelivered"], 2);
    let asked = r#"{"status":"dead","sink":"main","reason":"it is right now"}"#;
    let done = post("/api/v1/events/redeliver", asked).to(rig.gateway.admin).await;
    assert_eq!(done.json()["redelivered"], 2, "{}", done.json());
    let sent = "select count(*) from outbox_events where status = 'sent'";
    eventually("they are delivered", async || rig.place.count(sent).await == 2).await;
    let seen = sink.seen();
    assert_eq!((seen.len(), sink.ids().len()), (5, 3), "under their ids, and the other one never");
    for id in &ids[1..] {
        let (_, shown) = json(&rig.gateway, &["events", "show", id]);
        let attempts = shown["attempts"].as_array().unwrap();
        let statuses: Vec<_> = attempts.iter().map(|attempt| &attempt["status"]).collect();
        assert_eq!(statuses, [500, 200], "all of it: {shown}");
    }
    let (_, life) =
        json(&rig.gateway, &["records", "show", events[1]["record_id"].as_str().unwrap()]);
    let told = &life["audit"][0];
    assert_eq!(
        (&told["action"], &told["event_id"], &told["why"]),
        (&"event.redeliver".into(), &ids[1].into(), &"it is right now".into()),
        "{life}"
    );
    let over = post(&format!("/api/v1/events/{}/discard", ids[1]), "").to(rig.gateway.admin).await;
    assert_eq!((over.status.as_u16(), over.problem().as_str()), (409, "sent"));

    // What is in flight is left alone by both, whoever asks.
    order("held").to(rig.gateway.addr).await;
    eventually("the sink holds it", async || sink.seen().len() == 6).await;
    let held = sink.seen()[5].id();
    for action in ["redeliver", "discard"] {
        let (code, refused) = json(&rig.gateway, &["events", action, &held]);
        assert_eq!((code, &refused["refused"]), (1, &"delivering".into()));
        let path = format!("/api/v1/events/{held}/{action}");
        assert_eq!(post(&path, "").to(rig.gateway.admin).await.problem(), "delivering");
    }
    open.send_replace(true);
    eventually("it is delivered", async || rig.place.count(sent).await == 3).await;
    assert_eq!(sink.seen().len(), 6, "once");

    let audit = audit(&rig.place).await;
    assert_eq!(audit.len(), 2, "{audit:?}");
    assert_eq!((audit[0].0.as_str(), audit[0].1.as_deref()), ("event.discard", Some(why[1])));
    assert_eq!(audit[0].2["sink"], "main");
    assert_eq!(
        (audit[1].0.as_str(), audit[1].1.as_deref()),
        ("event.redeliver", Some("it is right now"))
    );
    assert_eq!((&audit[1].2["count"], &audit[1].2["sink"]), (&2.into(), &"main".into()));
}

/// A store with this many dead events.
async fn with_dead(which: Which, place: &Place, count: u32) -> std::sync::Arc<dyn Store> {
    let store: std::sync::Arc<dyn Store> = match which {
        Which::Sqlite => crate::sqlite::open(&place.folder.path().join("oncegate.db")).await,
        Which::Postgres => {
            let store = Postgres::open(crate::postgres::settings(&place.url)).await.unwrap();
            store.migrate(true).await.unwrap();
            std::sync::Arc::new(store)
        }
    };
    let (numbers, id, now, bytes) = match which {
        Which::Sqlite => (
            format!(
                "with recursive g(n) as (select 1 union all select n + 1 from g where n < {count})"
            ),
            "printf('00000000-0000-0000-0000-%012x', n)",
            "unixepoch() * 1000000",
            "x'7b7d'",
        ),
        Which::Postgres => (
            format!("with g as (select n from generate_series(1, {count}) n)"),
            "lpad(to_hex(n), 32, '0')::uuid",
            "clock_timestamp()",
            "'\\x7b7d'",
        ),
    };
    place
        .rows(&format!(
            "insert into outbox_messages (id, event_key, seq, event_type, tenant_id, operation,
               idempotency_key, record_id, payload, created_at)
             {numbers} select {id}, 'key-' || n, 0, 'a', 't', 'o', 'k', {id}, {bytes}, {now} from g"
        ))
        .await;
    place
        .rows(&format!(
            "insert into outbox_done (event_id, sink, outcome, claim_no, attempts, finished_at)
             {numbers} select {id}, 'main', 'dead', 7, 20, {now} from g"
        ))
        .await;
    store
}

async fn f55_very_many_dead_events_are_redelivered_once_though_asked_for_twice(which: Which) {
    let count: u32 = std::env::var("DEAD").ok().and_then(|n| n.parse().ok()).unwrap_or(5000);
    let place = Place::new(which).await;
    let store = with_dead(which, &place, count).await;
    let all = Chosen::Dead(DeadFilter { kind: Some("a".into()), ..DeadFilter::default() });
    let by = |who: &str| Operator { who: who.into(), why: None };
    let (one, other) = (by("olga"), by("otto"));
    let begun = Instant::now();
    let working =
        async { tokio::join!(store.redeliver(&all, &one), store.redeliver(&all, &other)) };
    tokio::pin!(working);
    // Meanwhile others are not held up: a claim and its verdict come between the pieces.
    let (mut looks, mut longest) = (0, Duration::ZERO);
    let (first, second) = loop {
        let asked = Instant::now();
        let looking = claim_and_fail_one(store.as_ref());
        tokio::select! {
            biased;
            done = &mut working => break done,
            () = looking => (looks, longest) = (looks + 1, longest.max(asked.elapsed())),
        }
    };
    let took = begun.elapsed();
    eprintln!("{count} redelivered twice in {took:?}, {looks} others waited {longest:?} at most");
    assert!(looks > 0, "others have a turn between the pieces");
    let (first, second) = (first.unwrap().count, second.unwrap().count);
    assert_eq!(first + second, u64::from(count), "each once");
    assert_eq!(place.count("select count(*) from audit_events").await, i64::from(count));
    let owed =
        "select count(*) from outbox_queue where lane = 1 and claim_no >= 8 and attempts <= 1";
    assert_eq!(place.count(owed).await, i64::from(count), "the numbers go on, the attempts anew");
    assert_eq!(place.count("select count(*) from outbox_done").await, 0);
    let counts = audit(&place).await;
    let sum: u64 = counts.iter().map(|(_, _, detail)| detail["count"].as_u64().unwrap()).sum();
    assert_eq!(sum, u64::from(count), "{counts:?}");
    assert!((1..=2).contains(&counts.len()), "a row for each action, not for each event");
    assert_eq!(counts[0].2["type"], "a");
}

/// One attempt of the retry lane, which is to be tried again in an hour.
async fn claim_and_fail_one(store: &dyn Store) {
    let claim = Claim {
        sink: "main".into(),
        lane: Lane::Retry,
        order: Order::None,
        limit: 1,
        owner: OwnerId::fresh(),
        lease: Duration::from_secs(60),
        reclaim: Reclaim::Expired,
        look: Look::Complete,
    };
    for claimed in store.claim(&claim).await.unwrap() {
        let delay = Duration::from_secs(3600);
        let verdict = Verdict::Retry { delay, status: Some(500), error: "x".into() };
        let (event_id, claim_no): (Uuid, i32) = (claimed.event_id, claimed.claim_no);
        let verdict = Acknowledgement { event_id, claim_no, verdict };
        assert_eq!(store.acknowledge("main", Order::None, &[verdict]).await.unwrap(), [event_id]);
    }
}
