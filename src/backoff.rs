//! Pauses between tries: a part of each is left to chance, so that replicas do not move in step; those of a back-off double.

use std::time::Duration;

/// Half to whole of a pause.
#[must_use]
pub fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Pauses that double up to a maximum. To begin anew is to make another one.
#[derive(Clone, Debug)]
pub struct Backoff {
    longest: Duration,
    max: Duration,
}

impl Backoff {
    /// From a first pause, which may be as long as it likes, up to a maximum.
    #[must_use]
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { longest: first, max }
    }

    /// How long the next pause is at most.
    #[must_use]
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// The next pause: half to whole of [`Backoff::longest`], which doubles.
    pub fn pause(&mut self) -> Duration {
        let pause = jittered(self.longest);
        self.longest = self.longest.saturating_mul(2).min(self.max);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_their_maximum_and_are_spread_over_half_of_it() {
        let (first, max) = (Duration::from_millis(20), Duration::from_millis(50));
        let mut spread = [Duration::MAX, Duration::ZERO];
        for _ in 0..1000 {
            let mut backoff = Backoff::new(first, max);
            for longest in [first, first * 2, max, max] {
                assert_eq!(backoff.longest(), longest);
                let pause = backoff.pause();
                assert!(longest / 2 <= pause && pause <= longest, "{longest:?}: {pause:?}");
                if longest == max {
                    spread = [spread[0].min(pause), spread[1].max(pause)];
                }
            }
        }
        // That 2000 pauses leave a fifth of their span empty happens once in more tries than there are atoms.
        assert!(spread[0] < max * 6 / 10 && spread[1] > max * 9 / 10, "{spread:?}");
    }
}
