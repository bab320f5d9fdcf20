//! How many deliveries a sink may have at once from this process, and when its failures make an outage.
//!
//! All slots while it is well. After a pause one, then twice as many after each round of answers, so that a sink that has
//! just come back is not knocked over by what has piled up. What must stay true: never more than `full` slots are taken,
//! and whoever waits for one is woken when one is given back or added.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// What this process has lately seen of a sink. Pure.
#[derive(Clone, Debug)]
struct Health {
    /// Slots of a sink that is well.
    full: usize,
    /// Slots now.
    open: usize,
    /// Good answers since `open` last grew.
    answers: usize,
    /// Failures in a row ...
    failures: u32,
    /// ... and how many of them are an outage.
    failures_max: u32,
    /// Failed probes of an outage that is not surely over, so that a sink that falls over again at once is probed no faster.
    /// One less with each good answer: where events are bad, and not the sink, there are some between them.
    level: u32,
}

impl Health {
    fn well(&mut self) {
        self.failures = 0;
        self.answers += 1;
        if self.answers >= self.open {
            self.answers = 0;
            self.open = self.open.saturating_mul(2).min(self.full);
        }
        self.level = if self.open == self.full { 0 } else { self.level.saturating_sub(1) };
    }

    fn failed(&mut self) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.failures >= self.failures_max
    }

    fn resumed(&mut self, level: u32) {
        (self.open, self.answers, self.failures, self.level) = (1, 0, 0, level);
    }
}

/// The slots of one sink.
#[derive(Debug)]
pub(super) struct Room {
    state: Mutex<(Health, usize)>,
    /// When a delivery last went well.
    well_at: Mutex<Option<Instant>>,
    freed: Notify,
}

/// A slot that is taken. Given back when it is dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Room>);

impl Drop for Slot {
    fn drop(&mut self) {
        let (_, taken) = &mut *self.0.state();
        *taken = taken.saturating_sub(1);
        self.0.freed.notify_one();
    }
}

impl Room {
    /// With `full` slots; `failures_max` failures in a row are an outage.
    pub(super) fn new(full: usize, failures_max: u32) -> Self {
        let health = Health { full, open: full, answers: 0, failures: 0, failures_max, level: 0 };
        Self { state: Mutex::new((health, 0)), well_at: Mutex::default(), freed: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, (Health, usize)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many slots are free.
    pub(super) fn free(&self) -> usize {
        let (health, taken) = &*self.state();
        health.open.saturating_sub(*taken)
    }

    /// Whether the sink has come back and has not got all its slots yet.
    pub(super) fn is_starting(&self) -> bool {
        let health = &self.state().0;
        health.open < health.full
    }

    /// How many slots there are now, free or taken.
    pub(super) fn open(&self) -> usize {
        self.state().0.open
    }

    /// Takes a free slot.
    pub(super) fn take(self: &Arc<Self>) -> Option<Slot> {
        let (health, taken) = &mut *self.state();
        if *taken >= health.open {
            return None;
        }
        *taken += 1;
        Some(Slot(Arc::clone(self)))
    }

    /// Waits until a slot may have become free. For one waiter.
    pub(super) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// A delivery went well.
    pub(super) fn well(&self) {
        self.note_well();
        self.state().0.well();
        self.freed.notify_one();
    }

    fn note_well(&self) {
        let mut well_at = self.well_at.lock().unwrap_or_else(PoisonError::into_inner);
        *well_at = Some(Instant::now());
    }

    /// Whether a delivery went well so lately.
    pub(super) fn was_well(&self, within: Duration) -> bool {
        let well_at = *self.well_at.lock().unwrap_or_else(PoisonError::into_inner);
        well_at.is_some_and(|at| at.elapsed() < within)
    }

    /// A delivery failed. Whether that makes an outage.
    pub(super) fn failed(&self) -> bool {
        self.state().0.failed()
    }

    /// How many deliveries have failed in a row.
    pub(super) fn failures(&self) -> u32 {
        self.state().0.failures
    }

    /// After how many failed probes the next pause goes on.
    pub(super) fn level(&self) -> u32 {
        self.state().0.level
    }

    /// The sink is open again, after so many failed probes: begins with one slot.
    pub(super) fn resumed(&self, level: u32) {
        self.note_well();
        self.state().0.resumed(level);
        self.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_pause_slots_double_with_each_round_of_answers_up_to_all() {
        let room = Arc::new(Room::new(16, 10));
        assert_eq!(room.free(), 16);
        room.resumed(3);
        let mut seen = Vec::new();
        for _ in 0..31 {
            seen.push(room.free());
            room.well();
        }
        let grown = [1, 2, 2, 4, 4, 4, 4, 8];
        assert_eq!(seen[..8], grown);
        assert_eq!(seen.iter().filter(|open| **open == 8).count(), 8);
        assert_eq!((seen[15], room.free(), room.level()), (16, 16, 0));
    }

    #[test]
    fn each_good_answer_makes_the_next_outage_one_level_less_and_all_slots_make_it_the_first() {
        let room = Room::new(4, 3);
        room.resumed(9);
        assert!(room.is_starting());
        assert_eq!(room.level(), 9, "that of a sink that falls over at once");
        for level in [8, 7] {
            room.well();
            room.failed();
            assert_eq!(
                (room.level(), room.is_starting()),
                (level, true),
                "failures change nothing"
            );
        }
        room.well();
        assert_eq!((room.level(), room.is_starting()), (0, false));
        // Where the outage was short, it is forgotten before all slots are open.
        room.resumed(1);
        room.well();
        room.well();
        assert_eq!((room.level(), room.is_starting()), (0, true));
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_known_for_how_long_nothing_has_gone_well() {
        let room = Room::new(4, 3);
        let second = Duration::from_secs(1);
        assert!(!room.was_well(second), "nothing has, yet");
        room.well();
        room.failed();
        assert!(room.was_well(second));
        tokio::time::advance(second).await;
        assert!(!room.was_well(second) && room.was_well(2 * second));
        room.resumed(1);
        assert!(room.was_well(second), "its probe did");
    }

    #[test]
    fn only_failures_in_a_row_make_an_outage() {
        let room = Room::new(4, 3);
        for _ in 0..20 {
            assert!(!room.failed() && !room.failed());
            room.well();
        }
        assert!(!room.failed() && !room.failed() && room.failed());
        assert!(room.failed(), "and go on being one until the pause is made");
    }

    #[test]
    fn a_slot_is_given_back_when_it_is_dropped_and_none_is_given_twice() {
        let room = Arc::new(Room::new(2, 1));
        let (one, two) = (room.take(), room.take());
        assert!(one.is_some() && two.is_some() && room.take().is_none());
        drop(one);
        assert_eq!(room.free(), 1);
        // Slots that are still out count against the one that a resumed sink begins with.
        room.resumed(0);
        assert!(room.take().is_none());
        drop(two);
        assert!(room.take().is_some());
    }
}
