//! Crashes on purpose: what dies, and when.

use std::time::Duration;

/// The moment of a crash, and what dies in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The sandbox, in the middle of a command.
    Command,
    /// The sandbox, when the commands have ended and the model has not heard of it.
    AfterCommand,
    /// The sandbox, while the model answers.
    Answer,
    /// The sandbox, while it stands still for a checkpoint: the first one from the crash's turn on.
    Checkpoint,
    /// Crab's own process, while the model answers.
    Crab,
    /// Crab's own process and the sandbox with it.
    CrabAndSandbox,
}

impl Moment {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Command, Self::AfterCommand, Self::Answer, Self::Checkpoint, Self::Crab, Self::CrabAndSandbox];

    /// For people.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Command => "sandbox killed in a command",
            Self::AfterCommand => "sandbox killed after a command",
            Self::Answer => "sandbox killed while the model answers",
            Self::Checkpoint => "sandbox killed in a checkpoint",
            Self::Crab => "Crab killed",
            Self::CrabAndSandbox => "Crab and sandbox killed",
        }
    }

    /// Whether it comes while the model is asked.
    #[must_use]
    pub fn is_while_asking(self) -> bool {
        !matches!(self, Self::Command | Self::AfterCommand)
    }

    /// Whether Crab's process dies.
    #[must_use]
    pub fn ends_crab(self) -> bool {
        matches!(self, Self::Crab | Self::CrabAndSandbox)
    }

    /// Whether the sandbox dies.
    #[must_use]
    pub fn ends_sandbox(self) -> bool {
        self != Self::Crab
    }
}

/// A crash on purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Crash {
    /// In the turn of this response, counted from 0.
    pub response: usize,
    /// When in that turn, and what dies.
    pub moment: Moment,
    /// How far into the command, or the model's answer, between 0 and 1.
    pub fraction: f64,
}

impl Crash {
    /// The crash of a seed: any moment in any of a session's turns.
    #[must_use]
    pub fn random(seed: u64, responses: usize) -> Self {
        let mut numbers = Numbers(seed);
        let moment = Moment::ALL[numbers.below(Moment::ALL.len())];
        Self::at(numbers.below(responses), moment, &mut numbers)
    }

    /// A crash of this kind in this turn, at a random point of it.
    pub fn at(response: usize, moment: Moment, numbers: &mut Numbers) -> Self {
        Self { response, moment, fraction: numbers.fraction() }
    }

    /// How long after the beginning of something that takes this long.
    #[must_use]
    pub fn delay(&self, whole: Duration) -> Duration {
        whole.mul_f64(self.fraction)
    }
}

/// Numbers that only depend on a seed: SplitMix64, after Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators" (2014).
#[derive(Clone, Debug)]
pub struct Numbers(
    /// The seed.
    pub u64,
);

impl Numbers {
    /// The next number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// The next number from 0 on, below `end`; 0 where there is none.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.any() >> 1).unwrap_or(0).checked_rem(end).unwrap_or(0)
    }

    /// The next number between 0 and 1.
    pub fn fraction(&mut self) -> f64 {
        (self.any() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_reach_every_moment_and_every_turn() {
        let crashes: Vec<Crash> = (0..2000).map(|seed| Crash::random(seed, 29)).collect();
        for moment in Moment::ALL {
            assert!(crashes.iter().any(|crash| crash.moment == moment), "{moment:?}");
        }
        for response in 0..29 {
            assert!(crashes.iter().any(|crash| crash.response == response), "turn {response}");
        }
        assert!(crashes.iter().all(|crash| (0.0..1.0).contains(&crash.fraction)));
    }

    #[test]
    fn a_seed_gives_the_same_crash_again() {
        assert_eq!(Crash::random(7, 29), Crash::random(7, 29));
    }
}
