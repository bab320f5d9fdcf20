//! The acceptance cases that the demo plays.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::store::{EventFilter, RecordFilter, Store};
use crate::tasks;

/// How long the demo waits for its events.
const PATIENCE: Duration = Duration::from_secs(15);

/// What the cases are played on: addresses, each `host:port`, and the gateway's store.
pub(super) struct Stage {
    pub(super) gateway: String,
    pub(super) orders: String,
    pub(super) consumer: String,
    pub(super) store: Arc<dyn Store>,
    /// What the keys begin with: another one for each run on one store.
    pub(super) run: String,
}

/// What the consumer has counted.
#[derive(Clone, Copy, Deserialize)]
pub(super) struct Taken {
    pub(super) received: u64,
    pub(super) distinct: u64,
    pub(super) forged: u64,
}

impl Taken {
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            received: self.received - before.received,
            distinct: self.distinct - before.distinct,
            forged: self.forged - before.forged,
        }
    }
}

/// What the API has counted.
#[derive(Deserialize)]
struct Made {
    made: u64,
}

/// A case with its counts.
pub(super) struct Played {
    pub(super) id: &'static str,
    pub(super) what: &'static str,
    pub(super) executed: u64,
    pub(super) records: u64,
    pub(super) events: u64,
    pub(super) answers: String,
    pub(super) held: bool,
}

/// The answer that a caller got.
struct Answer {
    status: StatusCode,
    replayed: bool,
    body: Bytes,
}

/// Counts before and after a case.
#[derive(Clone, Copy)]
struct Counts {
    executed: u64,
    records: u64,
    events: u64,
}

impl Counts {
    fn since(self, before: Self) -> Self {
        Self {
            executed: self.executed - before.executed,
            records: self.records - before.records,
            events: self.events - before.events,
        }
    }

    fn are(self, executed: u64, records: u64, events: u64) -> bool {
        (self.executed, self.records, self.events) == (executed, records, events)
    }
}

/// Plays all cases, in order. With them, what the consumer took meanwhile.
pub(super) async fn play_all(stage: &Stage) -> Result<(Vec<Played>, Taken), String> {
    let before = stage.there().await?;
    let played = vec![
        stage.twenty_at_once().await?,
        stage.other_parameters().await?,
        stage.two_tenants().await?,
        stage.two_events().await?,
        stage.lost_answer().await?,
    ];
    let events: u64 = played.iter().map(|case| case.events).sum();
    let begun = Instant::now();
    loop {
        let taken = stage.taken().await?.since(before);
        if taken.distinct == events {
            return Ok((played, taken));
        }
        if begun.elapsed() > PATIENCE {
            return Err("not every event reached the consumer".to_owned());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

impl Stage {
    /// Waits until API and consumer are there, as they need not be when containers begin. What the consumer has counted.
    async fn there(&self) -> Result<Taken, String> {
        let begun = Instant::now();
        loop {
            match (self.made(0).await, self.taken().await) {
                (Ok(_), Ok(taken)) => return Ok(taken),
                (Err(why), _) | (_, Err(why)) if begun.elapsed() > PATIENCE => return Err(why),
                (Err(_), _) | (_, Err(_)) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// How many orders the API has made, or is making, once there are so many.
    async fn made(&self, at_least: u64) -> Result<u64, String> {
        let made: Made = ask(&self.orders, &format!("/orders?at_least={at_least}")).await?;
        Ok(made.made)
    }

    async fn taken(&self) -> Result<Taken, String> {
        ask(&self.consumer, "/hook").await
    }

    async fn twenty_at_once(&self) -> Result<Played, String> {
        let before = self.counts().await?;
        let answers = self.at_once(&["acme"; 20], "001").await?;
        let counts = self.counts().await?.since(before);
        let bodies: HashSet<_> = answers.iter().map(|answer| answer.body.clone()).collect();
        let created = answers.iter().all(|answer| answer.status == StatusCode::CREATED);
        let held = counts.are(1, 1, 2) && bodies.len() == 1 && created;
        Ok(played("R1", "20 concurrent requests under one key", counts, &answers, held))
    }

    async fn other_parameters(&self) -> Result<Played, String> {
        let before = self.counts().await?;
        let answer = self.send("acme", "001", "1.00").await?;
        let counts = self.counts().await?.since(before);
        let held = counts.are(0, 0, 0) && answer.status == StatusCode::CONFLICT;
        Ok(played("R3", "the same key with another amount", counts, &[answer], held))
    }

    async fn two_tenants(&self) -> Result<Played, String> {
        let before = self.counts().await?;
        let tenants: Vec<_> = ["acme", "globex"].into_iter().cycle().take(20).collect();
        let answers = self.at_once(&tenants, "002").await?;
        let counts = self.counts().await?.since(before);
        let bodies: HashSet<_> = answers.iter().map(|answer| answer.body.clone()).collect();
        let held = counts.are(2, 2, 4) && bodies.len() == 2;
        Ok(played("R6", "two tenants, the same key, concurrently", counts, &answers, held))
    }

    async fn two_events(&self) -> Result<Played, String> {
        let before = self.counts().await?;
        let first = self.send("acme", "003", "129.90").await?;
        let again = self.send("acme", "003", "129.90").await?;
        let counts = self.counts().await?.since(before);
        let held = counts.are(1, 1, 2) && !first.replayed && again.replayed;
        Ok(played("R9", "one request with two events, and a replay", counts, &[first, again], held))
    }

    async fn lost_answer(&self) -> Result<Played, String> {
        let before = self.counts().await?;
        let (gateway, key) = (self.gateway.clone(), self.key("004"));
        let caller = tasks::short(async move { send(&gateway, "acme", &key, "129.90").await });
        // The caller's connection breaks while the API works.
        let reached = tokio::time::timeout(PATIENCE, self.made(before.executed + 1)).await;
        caller.abort();
        reached.map_err(|_| "the request did not reach the API".to_owned())??;
        let answer = self.send("acme", "004", "129.90").await?;
        let counts = self.counts().await?.since(before);
        let held = counts.are(1, 1, 2) && answer.replayed;
        Ok(played("R15", "the caller's connection dies; it sends again", counts, &[answer], held))
    }

    fn key(&self, number: &str) -> String {
        format!("{}-{number}", self.run)
    }

    async fn send(&self, tenant: &str, number: &str, amount: &str) -> Result<Answer, String> {
        send(&self.gateway, tenant, &self.key(number), amount).await
    }

    /// Sends the same request for each of the tenants, all at once.
    async fn at_once(&self, tenants: &[&'static str], number: &str) -> Result<Vec<Answer>, String> {
        let mut callers = JoinSet::new();
        for tenant in tenants.iter().copied() {
            let (gateway, key) = (self.gateway.clone(), self.key(number));
            callers.spawn(async move { send(&gateway, tenant, &key, "129.90").await });
        }
        let answers = callers.join_all().await;
        answers.into_iter().collect()
    }

    async fn counts(&self) -> Result<Counts, String> {
        let limit = 10_000;
        let records = RecordFilter { limit, ..RecordFilter::default() };
        let events = EventFilter { limit, ..EventFilter::default() };
        let records = self.store.list_records(&records).await.map_err(|error| error.to_string())?;
        let events = self.store.list_events(&events).await.map_err(|error| error.to_string())?;
        Ok(Counts {
            executed: self.made(0).await?,
            records: records.len() as u64,
            events: events.len() as u64,
        })
    }
}

fn played(
    id: &'static str,
    what: &'static str,
    counts: Counts,
    answers: &[Answer],
    held: bool,
) -> Played {
    let Counts { executed, records, events } = counts;
    let count =
        |wanted: fn(&Answer) -> bool| answers.iter().filter(|answer| wanted(answer)).count();
    let first = count(|answer| answer.status.is_success() && !answer.replayed);
    let replayed = count(|answer| answer.replayed);
    let refused = count(|answer| answer.status == StatusCode::CONFLICT);
    let answers = format!("{first} first, {replayed} replayed, {refused} refused");
    Played { id, what, executed, records, events, answers, held }
}

/// Sends one order on a new connection.
async fn send(gateway: &str, tenant: &str, key: &str, amount: &str) -> Result<Answer, String> {
    let order = serde_json::json!({ "customer": "c-1029", "amount": amount });
    let request = Request::post("/orders")
        .header("host", gateway)
        .header("content-type", "application/json")
        .header("x-tenant-id", tenant)
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from(order.to_string())));
    let request = request.map_err(|error| error.to_string())?;
    exchange(gateway, request).await.map_err(|error| format!("{gateway}: {error}"))
}

/// Asks API or consumer what it has counted.
async fn ask<T: DeserializeOwned>(address: &str, path: &str) -> Result<T, String> {
    let request = Request::builder().method(Method::GET).uri(path).header("host", address);
    let request = request.body(Full::default()).map_err(|error| error.to_string())?;
    let told = |error: &dyn std::fmt::Display| format!("{address}{path}: {error}");
    let answer = exchange(address, request).await.map_err(|error| told(&error))?;
    serde_json::from_slice(&answer.body).map_err(|error| told(&error))
}

async fn exchange(
    address: &str,
    request: Request<Full<Bytes>>,
) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The connection belongs to this future: dropping it closes the connection.
    let answer = async {
        let response = sender.send_request(request).await?;
        let (head, body) = response.into_parts();
        let replayed = head.headers.get("idempotent-replayed").is_some();
        let body = body.collect().await?.to_bytes();
        Ok::<_, hyper::Error>(Answer { status: head.status, replayed, body })
    };
    tokio::pin!(connection, answer);
    tokio::select! {
        answer = &mut answer => Ok(answer?),
        _ = &mut connection => Ok(answer.await?),
    }
}
