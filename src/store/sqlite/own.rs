//! What a process asks in order to look after its own records, after a copy of the file was put in its place, say.

use rusqlite::params;

use super::row::micros;
use super::thread::Tx;
use crate::record::{Attempt, Fence, Fingerprint, OwnerId, RecordId, Scope, Status};
use crate::store::read;
use crate::store::{Incarnation, OpenPiece, Proposal, Reinstated, ScanFrom};

/// Whoever restores a copy into the file that is open (`.restore`, the backup API) makes every connection read the schema
/// anew, by this number. A file that was replaced as a whole is noticed by the file itself.
pub(super) fn incarnation(tx: &Tx<'_>) -> rusqlite::Result<Incarnation> {
    tx.first("PRAGMA schema_version", [], |row| row.get(0).map(Incarnation))
        .map(|found| found.unwrap_or(Incarnation(0)))
}

pub(super) fn statuses(tx: &Tx<'_>, ids: &[RecordId]) -> rusqlite::Result<Vec<(Fence, Status)>> {
    const SQL: &str = "SELECT id, attempt, status FROM idempotency_records WHERE id = ?1";
    let one =
        |id: &RecordId| tx.first(SQL, [id], |row| Ok((read::fence(row)?, read::status(row)?)));
    ids.iter().filter_map(|id| one(id).transpose()).collect()
}

pub(super) fn reinstate(
    tx: &Tx<'_>,
    proposal: &Proposal,
    at: Attempt,
) -> rusqlite::Result<Reinstated> {
    // What an operator did to the record is known by the audit table, which outlives the row.
    const ACTED: &str = "SELECT 1 FROM audit_log
        WHERE record_id = ?1 AND action IN ('record.release', 'record.complete') LIMIT 1";
    const LIVES: &str = "SELECT 1 FROM oncegate_owners WHERE owner = ?1 AND lease_until > ?2";
    const SQL: &str = "INSERT INTO idempotency_records AS r (id, tenant_id, operation, key,
          request_hash, raw_hash, recipe, status, attempt, owner, caller, request_context,
          created_at, retention)
        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 'in_progress', ?8, ?9, ?10, ?11, ?12, ?13)
        ON CONFLICT (tenant_id, operation, key) DO UPDATE
        SET status = 'in_progress', attempt = excluded.attempt, owner = excluded.owner,
            caller = excluded.caller, request_context = excluded.request_context,
            retention = excluded.retention
        WHERE r.id = excluded.id AND r.attempt < excluded.attempt AND r.status <> 'completed'";
    let Proposal { id, owner, caller, fingerprint, .. } = proposal;
    let there = |_: &rusqlite::Row<'_>| Ok(());
    if tx.first(ACTED, [id], there)?.is_some() {
        return Ok(Reinstated::ActedOn);
    }
    let Scope { tenant, operation, key } = &proposal.scope;
    if tx.first(LIVES, params![owner, tx.now], there)?.is_none() {
        let exists = super::records::find(tx, &proposal.scope)?.is_some();
        return Ok(if exists { Reinstated::No } else { Reinstated::LeaseEnded });
    }
    let Fingerprint { canonical, raw, recipe } = fingerprint;
    let (context, retention) = (proposal.context.as_deref(), micros(proposal.retention));
    let params = params![
        id, tenant, operation, key, canonical, raw, recipe, at, owner, caller, context, tx.now,
        retention
    ];
    let back = tx.execute(SQL, params)?;
    Ok(if back == 1 { Reinstated::Yes } else { Reinstated::No })
}

/// All at once: the index of what is not completed is small.
pub(super) fn open_of(
    tx: &Tx<'_>,
    owner: OwnerId,
    from: ScanFrom,
    limit: u32,
) -> rusqlite::Result<OpenPiece> {
    const SQL: &str = "SELECT tenant_id, operation, key, id, attempt FROM idempotency_records
        WHERE status <> 'completed' AND status = 'in_progress' AND owner = ?1 LIMIT ?2";
    let read = |row: &rusqlite::Row<'_>| Ok((read::scope(row, "key")?, read::fence(row)?));
    Ok(match from {
        ScanFrom::Oldest | ScanFrom::Ago(_) => {
            let open = tx.rows(SQL, params![owner, limit], read)?;
            OpenPiece { open, last: None }
        }
        ScanFrom::After(..) => OpenPiece::default(),
    })
}
