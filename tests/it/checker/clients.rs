//! Clients: each follows its intents, retries with the same key until it has a final answer or gives up, hangs up, sends
//! two at once, and sometimes abuses a key for another request. Everything is written down.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join;
use http::Method;

use super::history::{Answer, Clock, Op, Scope, Told};
use super::plan::{self, Intent, Opening, Operation, PASS_KEPT_MS, Request};
use crate::support::client::post;

/// How long a client waits for an answer. Longer than most take; a gateway that sleeps, or a long wait for one, is given up.
const PATIENCE: Duration = Duration::from_millis(2500);

/// What all clients share.
pub(crate) struct Clients {
    pub(crate) seed: u64,
    pub(crate) clock: Clock,
    pub(crate) gateways: Vec<SocketAddr>,
    pub(crate) over: AtomicBool,
    ops: Mutex<Vec<Op>>,
    next: AtomicU64,
}

/// What a client makes of what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Done,
    Again,
    /// No use in asking before an operator has looked.
    Held,
}

impl Clients {
    pub(crate) fn new(seed: u64, clock: Clock, gateways: Vec<SocketAddr>) -> Arc<Self> {
        let (over, next) = (AtomicBool::new(false), AtomicU64::new(1));
        Arc::new(Self { seed, clock, gateways, over, ops: Mutex::default(), next })
    }

    pub(crate) fn ops(&self) -> Vec<Op> {
        self.ops.lock().unwrap().clone()
    }

    /// One client: its intents one after the other, until it is over. What it intended.
    pub(crate) async fn live(self: Arc<Self>, client: usize) -> Vec<Intent> {
        let mut intents = Vec::new();
        while !self.over.load(Ordering::SeqCst) {
            let intent = plan::intent(self.seed, client, intents.len(), self.gateways.len());
            intents.push(intent.clone());
            self.pursue(&intent).await;
        }
        intents
    }

    async fn pursue(&self, intent: &Intent) {
        let (first, second) = (intent.tries[0].0, (intent.tries[0].0 + 1) % self.gateways.len());
        let Intent { scope, request, other, .. } = intent;
        match intent.opening {
            Opening::Alone => {}
            Opening::HangUp(ms) => {
                self.send(scope, request, first, Duration::from_millis(ms)).await;
            }
            Opening::Twins => {
                join(self.ask(scope, request, first), self.ask(scope, request, second)).await;
            }
            Opening::Rivals => {
                join(self.ask(scope, request, first), self.ask(scope, other, second)).await;
            }
        }
        for &(replica, pause) in &intent.tries {
            let told = self.ask(scope, request, replica).await;
            match next(&told, intent.operation) {
                Next::Done => return self.afterwards(intent).await,
                Next::Held => return,
                Next::Again => {
                    // Until the API may be asked.
                    let slow = if intent.operation.asks() { 2 } else { 1 };
                    tokio::time::sleep(Duration::from_millis(pause * slow)).await;
                }
            }
            if self.over.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    /// Once it has its answer: the same again, and perhaps something else under the same key.
    async fn afterwards(&self, intent: &Intent) {
        // Now and then once more when it is new again.
        if intent.operation.expires() && intent.again == 2 {
            tokio::time::sleep(Duration::from_millis(PASS_KEPT_MS + 200)).await;
        }
        for &(replica, _) in intent.tries.iter().rev().take(intent.again) {
            self.ask(&intent.scope, &intent.request, replica).await;
        }
        if intent.abuses {
            self.ask(&intent.scope, &intent.other, intent.tries[0].0).await;
        }
    }

    pub(crate) async fn ask(&self, scope: &Scope, request: &Request, gateway: usize) -> Told {
        self.send(scope, request, gateway, PATIENCE).await
    }

    async fn send(
        &self,
        scope: &Scope,
        request: &Request,
        gateway: usize,
        limit: Duration,
    ) -> Told {
        let id = self.next.fetch_add(1, Ordering::SeqCst);
        let method = if request.put { Method::PUT } else { Method::POST };
        let ask = post(&request.target, &request.body).method(method);
        let ask = ask.tenant(&scope.tenant).key(&scope.key).header("x-op", id.to_string());
        let invoked = self.clock.now();
        let told = match tokio::time::timeout(limit, ask.send(self.gateways[gateway])).await {
            Ok(Ok(answer)) => Told::Answer(Answer::from(answer)),
            Ok(Err(error)) => {
                // Nobody is there just now.
                tokio::time::sleep(Duration::from_millis(20)).await;
                Told::Nothing(error.to_string())
            }
            Err(_) => Told::Nothing(format!("hung up after {limit:?}")),
        };
        let ended = self.clock.now();
        self.ops.lock().unwrap().push(Op {
            id,
            gateway,
            scope: scope.clone(),
            target: request.target.clone(),
            body: request.body.clone(),
            invoked,
            ended,
            told: told.clone(),
        });
        told
    }
}

fn next(told: &Told, operation: Operation) -> Next {
    let Told::Answer(answer) = told else { return Next::Again };
    match answer.problem().as_deref() {
        None if answer.kept() => Next::Done,
        Some("response-not-retained" | "request-mismatch") => Next::Done,
        Some("outcome-unknown") if !operation.retries() && !operation.asks() => Next::Held,
        _ => Next::Again,
    }
}
