//! The way of a request on a protected route.
//!
//! ```text
//! read -> join the scope's single flight -> lead:   reserve -> forward -> complete -> reply
//!                                        -> follow: wait for the leader's end       -> reply
//! ```
//!
//! What must stay true:
//!
//! - From the moment a leader asks the store, its work is a task of its own. A caller that hangs up changes nothing: the
//!   request is completed all the same, and its retry gets the stored answer.
//! - A follower is no task. It holds no connection, no reservation and no memory for an answer.
//! - A permit for the answer's memory is acquired before anything is reserved, so that nothing runs out in the middle.

use std::sync::Arc;
use std::time::Instant;

use http::{Request, Response};
use tokio::sync::oneshot;

use super::Gateway;
use super::budget::Exhausted;
use super::complete::Finish;
use super::forward::{self, Bounds};
use super::intake::{Keyed, ReadRequest};
use super::lookup::AfterLookup;
use super::problem::{Name, Problem};
use super::reply;
use super::reserve::{self, Admission, Leader, Role};
use super::upstream::Body;
use crate::fault::{self, Point};
use crate::route::Route;
use crate::scope::Params;
use crate::telemetry::{Reply, Step};

impl Gateway {
    /// Answers a request on a keyed route.
    pub(super) async fn keyed(
        self: Arc<Self>,
        route: Arc<Route>,
        params: &Params,
        request: Request<Body>,
    ) -> Response<Body> {
        let mut keyed = match self.intake.read(&route, params, request).await {
            ReadRequest::Keyed(keyed) => keyed,
            ReadRequest::Unkeyed(request) => {
                self.metrics.replied(route.operation.as_str(), Reply::Passed);
                let upstream = self.upstream(&route);
                return reply::counted_as(Reply::Passed, self.pass(&upstream, request).await);
            }
            ReadRequest::Refused(problem) => return self.refuse(&route, problem),
        };
        let deadline = Instant::now() + route.policy.wait;
        loop {
            match self.single_flight.join(&keyed.request.scope) {
                Role::Stored(replay) => {
                    let admission = reserve::from_record(&keyed.request, replay);
                    return self.reply(&mut keyed, admission, Reply::Replayed).await;
                }
                // Dropping the leader lets the others look again.
                Role::Leader(leader) => match keyed.permit.work() {
                    Ok(()) => return self.spawn_leader(keyed, leader, deadline).await,
                    Err(Exhausted) => return self.overloaded(&route),
                },
                Role::Follower(follower) => {
                    if keyed.permit.wait() == Err(Exhausted) {
                        return self.overloaded(&route);
                    }
                    match self.single_flight.follow(&keyed.request, follower, deadline).await {
                        Some(Admission::Refuse(refusal)) if self.bypasses(&keyed, refusal) => {
                            return self.bypass(*keyed).await;
                        }
                        Some(admission) => {
                            return self.reply(&mut keyed, admission, Reply::Waited).await;
                        }
                        // The leader left without an end: join again.
                        None => {}
                    }
                }
            }
        }
    }

    /// Does a leader's work in a task of its own, and waits for its answer as long as the caller does.
    async fn spawn_leader(
        self: Arc<Self>,
        keyed: Box<Keyed>,
        leader: Leader,
        deadline: Instant,
    ) -> Response<Body> {
        let (answer, answered) = oneshot::channel();
        let sending = leader.sending();
        let (gateway, route) = (Arc::clone(&self), Arc::clone(&keyed.route));
        self.tasks.spawn(async move {
            let response = gateway.run_leader(*keyed, leader, deadline).await;
            // Nobody waits any more: the retry finds the result.
            drop(answer.send(response));
        });
        match answered.await {
            Ok(response) => response,
            // The task panicked; what it held is settled as far as is known.
            Err(_) if sending.has_begun() => {
                self.refuse(&route, Problem::new(Name::UpstreamFailed))
            }
            Err(_) => self.refuse(&route, Problem::new(Name::GatewayFailed)),
        }
    }

    /// A leader's work: reserve, forward, complete.
    async fn run_leader(
        self: Arc<Self>,
        mut keyed: Keyed,
        leader: Leader,
        deadline: Instant,
    ) -> Response<Body> {
        let route = Arc::clone(&keyed.route);
        let reservation = match self.single_flight.lead(&keyed.request, leader, deadline).await {
            Admission::Execute(reservation) => reservation,
            Admission::LookUp(guard) => {
                let _in_flight = self.metrics.in_flight();
                match self.look_up_first(&route, &keyed.request, guard).await {
                    AfterLookup::Send(reservation) => reservation,
                    AfterLookup::Over(finish) => return self.reply_looked_up(keyed, *finish).await,
                }
            }
            Admission::Refuse(refusal) if self.bypasses(&keyed, refusal) => {
                return self.bypass(keyed).await;
            }
            other @ (Admission::Replay(_) | Admission::Share(_) | Admission::Refuse(_)) => {
                return self.reply(&mut keyed, other, Reply::Replayed).await;
            }
        };
        let _in_flight = self.metrics.in_flight();
        let context = keyed.context.take();
        let upstream = self.upstream(&route);
        let request =
            keyed.outgoing(&self.settings.forwarding, &upstream, Some(reservation.fence()));
        let policy = &route.policy;
        let bounds = Bounds { timeout: policy.timeout, body_max: policy.response_body_max };
        let begun = Instant::now();
        let (mut in_flight, evidence, open_exchange) =
            forward::forward(reservation, upstream, request, bounds).await;
        self.metrics.took(Step::Forward, begun.elapsed());
        // What was taken for the answer, cut down to it, stays taken until store and caller have it.
        let bytes = evidence.bytes();
        let held = keyed.permit.answer(bytes).ok();
        in_flight.hold(held.clone());
        let completer = self.completer(&route, context.as_deref());
        let (finish, late) = completer.close(in_flight, evidence, open_exchange).await;
        if let Some(late) = late {
            self.await_late(late, &route, context);
        }
        fault::point(Point::BeforeReply).await;
        let response = self.finished(&keyed, finish).await;
        match held {
            Some(held) => response.map(|body| held.carry(body, bytes)),
            None => response,
        }
    }

    /// What a retry gets that asked first. What was found may be what another caller's attempt brought.
    async fn reply_looked_up(&self, mut keyed: Keyed, finish: Finish) -> Response<Body> {
        if let Finish::Found(found) = finish {
            return self.reply(&mut keyed, Admission::Replay(found), Reply::Replayed).await;
        }
        self.finished(&keyed, finish).await
    }
}
