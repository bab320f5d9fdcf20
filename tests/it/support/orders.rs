//! The API behind the gateway: knows nothing of idempotency, counts every execution, can be held and told what to answer.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// One execution.
#[derive(Clone, Debug)]
pub struct Execution {
    /// The business object's id.
    pub id: usize,
    pub target: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Execution {
    pub fn key(&self) -> Option<&str> {
        self.headers.get("idempotency-key")?.to_str().ok()
    }
}

impl Execution {
    pub fn tenant(&self) -> Option<&str> {
        self.headers.get("x-tenant-id")?.to_str().ok()
    }
}

/// Which executions are answered.
#[derive(Clone, Copy, Debug)]
enum Gate {
    Open,
    Closed,
    /// All but this one.
    Without(usize),
}

impl Gate {
    fn lets(self, execution: usize) -> bool {
        match self {
            Self::Open => true,
            Self::Closed => false,
            Self::Without(held) => held != execution,
        }
    }
}

type Answerer = dyn Fn(&Execution) -> Response<Full<Bytes>> + Send + Sync;

/// The header in which an answer says for which key it was executed.
pub const EXECUTED_FOR: &str = "x-executed-for";

/// The API. Whatever it answers, [`EXECUTED_FOR`] says to which key.
pub struct Orders {
    pub addr: SocketAddr,
    ledger: Arc<Mutex<Vec<Execution>>>,
    arrived: watch::Receiver<usize>,
    gate: watch::Sender<Gate>,
    answerer: Arc<Mutex<Arc<Answerer>>>,
    pace: watch::Sender<Duration>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Orders {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// What it answers if not told otherwise: 201 with the new order.
pub fn created(execution: &Execution) -> Response<Full<Bytes>> {
    let body = serde_json::json!({ "id": format!("order-{}", execution.id), "status": "created" });
    Response::builder()
        .status(StatusCode::CREATED)
        .header("content-type", "application/json")
        .header("location", format!("/orders/order-{}", execution.id))
        .body(Full::new(body.to_string().into()))
        .expect("an answer")
}

impl Orders {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("its address");
        let (ledger, (count, arrived)) = (Arc::new(Mutex::new(Vec::new())), watch::channel(0));
        let gate = watch::Sender::new(Gate::Open);
        let answerer: Arc<Mutex<Arc<Answerer>>> = Arc::new(Mutex::new(Arc::new(created)));
        let pace = watch::Sender::new(Duration::ZERO);
        let paced = pace.clone();
        let shared = (Arc::clone(&ledger), Arc::new(count), gate.clone(), Arc::clone(&answerer));
        let server = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let (ledger, count, gate, answerer) = shared.clone();
                let pace = paced.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let (ledger, count) = (Arc::clone(&ledger), Arc::clone(&count));
                    let (mut gate, answerer) = (gate.subscribe(), Arc::clone(&answerer));
                    let pace = *pace.borrow();
                    async move {
                        let (head, body) = request.into_parts();
                        let Ok(body) = body.collect().await else {
                            return Ok(Response::new(Full::default()));
                        };
                        let execution = {
                            let mut ledger = ledger.lock().expect("the ledger");
                            let execution = Execution {
                                id: ledger.len() + 1,
                                target: head.uri.to_string(),
                                headers: head.headers,
                                body: body.to_bytes(),
                            };
                            ledger.push(execution.clone());
                            count.send_replace(ledger.len());
                            execution
                        };
                        tokio::time::sleep(pace).await;
                        let _ = gate.wait_for(|gate| gate.lets(execution.id)).await;
                        let answer = Arc::clone(&answerer.lock().expect("the answerer"));
                        let mut response = answer(&execution);
                        if let Some(key) = execution.headers.get("idempotency-key") {
                            response.headers_mut().insert(EXECUTED_FOR, key.clone());
                        }
                        Ok::<_, Infallible>(response)
                    }
                });
                tokio::spawn(async move {
                    let mut connection = hyper::server::conn::http1::Builder::new();
                    // What has arrived is executed, also when its sender is gone by then.
                    connection.half_close(true);
                    let _ = connection.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { addr, ledger, arrived, gate, answerer, pace, server }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// All executions so far.
    pub fn ledger(&self) -> Vec<Execution> {
        self.ledger.lock().expect("the ledger").clone()
    }

    /// How often it was asked to execute.
    pub fn runs(&self) -> usize {
        self.ledger().len()
    }

    /// How often under this key.
    pub fn runs_of(&self, key: &str) -> usize {
        self.ledger().iter().filter(|execution| execution.key() == Some(key)).count()
    }

    /// Takes this long for each execution from now on, after writing it down.
    pub fn pace(&self, pace: Duration) {
        self.pace.send_replace(pace);
    }

    /// Executes from now on, but answers only after [`Orders::go`].
    pub fn hold(&self) {
        self.gate.send_replace(Gate::Closed);
    }

    /// As [`Orders::hold`], the execution of this number only; all others are answered.
    pub fn hold_only(&self, execution: usize) {
        self.gate.send_replace(Gate::Without(execution));
    }

    /// Answers what was held, and everything after it.
    pub fn go(&self) {
        self.gate.send_replace(Gate::Open);
    }

    /// Waits until it has been asked `count` times in all.
    pub async fn asked(&self, count: usize) {
        let mut arrived = self.arrived.clone();
        let waiting = arrived.wait_for(|seen| *seen >= count);
        tokio::time::timeout(Duration::from_secs(20), waiting)
            .await
            .unwrap_or_else(|_| panic!("the API was asked {} times, not {count}", self.runs()))
            .expect("the API lives");
    }

    /// From now on answers this.
    pub fn answer(
        &self,
        answer: impl Fn(&Execution) -> Response<Full<Bytes>> + Send + Sync + 'static,
    ) {
        *self.answerer.lock().expect("the answerer") = Arc::new(answer);
    }

    /// From now on answers this status with an empty body.
    pub fn answer_status(&self, status: u16) {
        self.answer(move |_| {
            Response::builder().status(status).body(Full::default()).expect("an answer")
        });
    }

    /// From now on creates orders again.
    pub fn answer_created(&self) {
        self.answer(created);
    }
}
