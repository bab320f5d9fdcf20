//! The states of the sinks: one row each, each change of it fenced by its number. The same rules as on Postgres.

use rusqlite::params;

use super::super::{
    Changed, Operator, PauseReason, Reclaim, SinkChange, SinkOrder, SinkState, Trouble,
};
use super::operator::{Action, audit};
use super::records::changed;
use super::row::micros;
use super::thread::Tx;
use crate::store::read;

pub(super) fn states(tx: &Tx<'_>, reclaim: Reclaim) -> rusqlite::Result<Vec<SinkState>> {
    // A probe of a process whose lease has ended is over, for those who may take its owner for dead.
    const SQL: &str = "SELECT sink, pause_no, pause_reason, since, failed_probes, last_error, note,
          probed_until IS NOT NULL AS probing, coalesce(probed_until, probe_at) - ?1 AS probe_in
        FROM (SELECT *, CASE WHEN probing_until > ?1 AND NOT (?2 AND NOT EXISTS (
              SELECT 1 FROM oncegate_owners o WHERE o.owner = s.prober AND o.lease_until > ?1))
            THEN probing_until END AS probed_until
          FROM outbox_sinks s) ORDER BY sink";
    tx.rows(SQL, params![tx.now, reclaim == Reclaim::ExpiredOrOrphaned], |row| {
        read::sink_state(row)
    })
}

pub(super) fn change(
    tx: &Tx<'_>,
    sink: &str,
    no: i64,
    change: &SinkChange,
) -> rusqlite::Result<Changed> {
    const PROBE: &str = "UPDATE outbox_sinks
        SET pause_no = pause_no + 1, prober = ?3, probing_until = ?4
        WHERE sink = ?1 AND pause_no = ?2 AND pause_reason IN ('failing', 'busy')
          AND probe_at <= ?5
          AND (probing_until IS NULL OR probing_until <= ?5 OR (?6 AND NOT EXISTS (
            SELECT 1 FROM oncegate_owners o WHERE o.owner = prober AND o.lease_until > ?5)))";
    const RESUME: &str = "UPDATE outbox_sinks
        SET pause_no = pause_no + 1, pause_reason = NULL, since = ?3, probe_at = NULL,
          prober = NULL, probing_until = NULL, failed_probes = 0
        WHERE sink = ?1 AND pause_no = ?2 AND pause_reason IS NOT NULL AND prober IS NOT NULL";
    match change {
        SinkChange::Pause { trouble, error, failed_probes } => {
            pause(tx, sink, no, *trouble, error, *failed_probes)
        }
        SinkChange::Probe { owner, lease, reclaim } => {
            let until = tx.now + micros(*lease);
            let orphans = *reclaim == Reclaim::ExpiredOrOrphaned;
            let params = params![sink, no, owner, until, tx.now, orphans];
            tx.execute(PROBE, params).map(changed)
        }
        SinkChange::ProbeFailed { trouble, error } => {
            let at = trouble.again().map(|again| tx.now + micros(again));
            probe_ended(tx, sink, no, Some(trouble.reason()), at, 1, Some(error))
        }
        SinkChange::ProbeIdle { again } => {
            probe_ended(tx, sink, no, None, Some(tx.now + micros(*again)), 0, None)
        }
        SinkChange::Resume => tx.execute(RESUME, params![sink, no, tx.now]).map(changed),
    }
}

fn pause(
    tx: &Tx<'_>,
    sink: &str,
    no: i64,
    trouble: Trouble,
    error: &str,
    failed_probes: u32,
) -> rusqlite::Result<Changed> {
    // The first row of a sink is made under the number 0 only; every other pause finds it under its number, and open.
    const SQL: &str = "INSERT INTO outbox_sinks (sink, pause_no, pause_reason, since, probe_at,
          failed_probes, last_error)
        SELECT ?1, 1, ?3, ?4, ?5, ?6, ?7
        WHERE ?2 = 0 OR EXISTS (SELECT 1 FROM outbox_sinks WHERE sink = ?1)
        ON CONFLICT (sink) DO UPDATE
        SET pause_no = pause_no + 1, pause_reason = excluded.pause_reason, since = excluded.since,
          probe_at = excluded.probe_at, failed_probes = excluded.failed_probes,
          last_error = excluded.last_error, note = NULL
        WHERE pause_no = ?2 AND pause_reason IS NULL";
    let at = trouble.again().map(|again| tx.now + micros(again));
    let reason = trouble.reason().as_str();
    tx.execute(SQL, params![sink, no, reason, tx.now, at, failed_probes, error]).map(changed)
}

/// Without a reason the pause stays as it is, as after a probe that found nothing to send.
fn probe_ended(
    tx: &Tx<'_>,
    sink: &str,
    no: i64,
    reason: Option<PauseReason>,
    at: Option<i64>,
    failed: u32,
    error: Option<&String>,
) -> rusqlite::Result<Changed> {
    const SQL: &str = "UPDATE outbox_sinks
        SET pause_no = pause_no + 1, pause_reason = coalesce(?3, pause_reason),
          since = CASE WHEN ?3 = 'gone' THEN ?4 ELSE since END, probe_at = ?5,
          prober = NULL, probing_until = NULL, failed_probes = failed_probes + ?6,
          last_error = coalesce(?7, last_error)
        WHERE sink = ?1 AND pause_no = ?2 AND pause_reason IS NOT NULL AND prober IS NOT NULL";
    let reason = reason.map(PauseReason::as_str);
    tx.execute(SQL, params![sink, no, reason, tx.now, at, failed, error]).map(changed)
}

pub(super) fn operate(
    tx: &Tx<'_>,
    sink: &str,
    order: SinkOrder,
    by: &Operator,
) -> rusqlite::Result<Changed> {
    const WAS: &str = "SELECT pause_reason FROM outbox_sinks WHERE sink = ?1";
    const PAUSE: &str = "INSERT INTO outbox_sinks (sink, pause_no, pause_reason, since, note)
        VALUES (?1, 1, 'operator', ?2, ?3)
        ON CONFLICT (sink) DO UPDATE
        SET pause_no = pause_no + 1, pause_reason = 'operator', since = excluded.since,
          probe_at = NULL, prober = NULL, probing_until = NULL, failed_probes = 0,
          note = excluded.note
        WHERE pause_reason IS NOT 'operator'";
    const RESUME: &str = "UPDATE outbox_sinks
        SET pause_no = pause_no + 1, pause_reason = NULL, since = ?2, probe_at = NULL,
          prober = NULL, probing_until = NULL, failed_probes = 0, note = NULL
        WHERE sink = ?1 AND pause_reason IS NOT NULL";
    let was: Option<Option<String>> = tx.first(WAS, [sink], |row| row.get(0))?;
    let rows = match order {
        SinkOrder::Pause => tx.execute(PAUSE, params![sink, tx.now, by.why])?,
        SinkOrder::Resume => tx.execute(RESUME, params![sink, tx.now])?,
    };
    if rows == 0 {
        return Ok(Changed::No);
    }
    let detail = serde_json::json!({ "sink": sink, "was": was.flatten() });
    audit(tx, by, &Action { name: order.action(), record: None, event: None, detail })?;
    Ok(Changed::Yes)
}

pub(super) fn last_failure(tx: &Tx<'_>, sink: &str) -> rusqlite::Result<Option<String>> {
    // What was tried is in the retry lane; the head of its far end was tried last, but for the jitter of its pause.
    // Where nothing is tried any more, what died last.
    const SQL: &str = "SELECT coalesce(
          (SELECT last_error FROM outbox_queue
          WHERE sink = ?1 AND lane = 1 AND last_error IS NOT NULL
          ORDER BY next_attempt_at DESC, event_id DESC LIMIT 1),
          (SELECT last_error FROM outbox_done WHERE sink = ?1 AND outcome = 'dead'
          ORDER BY finished_at DESC, event_id DESC LIMIT 1))";
    tx.first(SQL, [sink], |row| row.get(0)).map(Option::flatten)
}
