//! What a turn's delta asks for: nothing, one domain, or both, and how soon. Pure.

use std::time::Duration;

use crab_core::{Delta, Domain, Half, Manifest};

/// The domains that a checkpoint captures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Plan {
    /// The files are captured anew.
    pub filesystem: bool,
    /// The processes are captured anew.
    pub process: bool,
}

impl Plan {
    /// Nothing is captured: the turn rides on the standing version.
    pub const SKIP: Self = Self { filesystem: false, process: false };
    /// The files alone; they are paired with the standing version's processes.
    pub const FILESYSTEM: Self = Self { filesystem: true, process: false };
    /// The processes alone; they are paired with the standing version's files.
    pub const PROCESS: Self = Self { filesystem: false, process: true };
    /// Both, at one cut.
    pub const FULL: Self = Self { filesystem: true, process: true };

    /// Everything that either plan captures.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self { filesystem: self.filesystem || other.filesystem, process: self.process || other.process }
    }

    /// Whether nothing is captured.
    #[must_use]
    pub fn is_skip(self) -> bool {
        self == Self::SKIP
    }

    /// Whether this plan captures the domain.
    #[must_use]
    pub fn captures(self, domain: Domain) -> bool {
        match domain {
            Domain::Filesystem => self.filesystem,
            Domain::Process => self.process,
        }
    }

    /// A short name that stays the same, for tables and metrics: `skip`, `fs`, `process` or `full`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match (self.filesystem, self.process) {
            (false, false) => "skip",
            (true, false) => "fs",
            (false, true) => "process",
            (true, true) => "full",
        }
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.label())
    }
}

/// What a decision rests on.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct View<'a> {
    /// What changed since the standing version.
    pub delta: &'a Delta,
    /// The version that a restore would bring back now, where there is one.
    pub standing: Option<&'a Manifest>,
    /// Whether the engine can save processes at all.
    pub saves_processes: bool,
    /// How many versions were made since the last one that captured both domains.
    pub since_full: u64,
    /// How long ago the standing version was captured. `None` where it was not captured since the sandbox was attached
    /// or restored.
    pub since_version: Option<Duration>,
    /// What capturing the standing version cost the sandbox, with the freeze; zero where that is not known.
    pub last_cost: Duration,
}

impl<'a> View<'a> {
    /// A view of a delta against the standing version.
    #[must_use]
    pub fn new(delta: &'a Delta, standing: Option<&'a Manifest>, saves_processes: bool) -> Self {
        Self { delta, standing, saves_processes, since_full: 0, since_version: None, last_cost: Duration::ZERO }
    }
}

/// The least that a sound checkpoint captures.
///
/// - Without a standing version: both domains.
/// - A domain that is not proven unchanged, or whose half the standing version could not store, is captured.
/// - A domain that is proven unchanged is paired from the standing version.
///
/// Without a process backend the process domain is never captured; the manifest says that it is missing.
#[must_use]
pub fn sound(view: &View<'_>) -> Plan {
    let Some(standing) = view.standing else {
        return Plan { filesystem: true, process: view.saves_processes };
    };
    Plan {
        filesystem: view.delta.filesystem.needs_checkpoint() || !matches!(standing.filesystem, Half::Stored(_)),
        process: view.saves_processes
            && (view.delta.process.needs_checkpoint() || matches!(standing.process, Half::Missing(_))),
    }
}

/// Decides what a turn's checkpoint captures, and how soon.
///
/// A policy can ask for more than [`sound`] does, never for less: the engine captures the union of both.
pub trait Policy: Send + Sync {
    /// What to capture. Called at the boundary and again at the cut; must be quick and must not block.
    fn decide(&self, view: &View<'_>) -> Plan;

    /// How long a turn that changed something waits for its checkpoint; zero for not at all. Called at the boundary,
    /// where a version stands; a turn without any version never waits.
    ///
    /// The answer of a turn that waits goes out **unprotected**, whatever the failure policy, and the turn is reported
    /// as deferred. One checkpoint covers it and all turns until then. A sandbox that dies before comes back without
    /// them.
    fn defer(&self, _view: &View<'_>) -> Duration {
        Duration::ZERO
    }
}

/// Captures exactly what is not proven unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChangedOnly;

impl Policy for ChangedOnly {
    fn decide(&self, view: &View<'_>) -> Plan {
        sound(view)
    }
}

/// Captures what changed, and both domains at least at every `n`th version, so that no half grows too old. A turn that
/// changed nothing is still skipped.
#[derive(Clone, Copy, Debug)]
pub struct FullEvery(
    /// Every how many versions; 0 and 1 mean every one.
    pub u64,
);

impl Policy for FullEvery {
    fn decide(&self, view: &View<'_>) -> Plan {
        let least = sound(view);
        if !least.is_skip() && view.since_full.saturating_add(1) >= self.0 {
            return Plan { filesystem: true, process: view.saves_processes };
        }
        least
    }
}

/// Makes no version sooner than this after the last, and else does what another policy says. See [`Policy::defer`] for
/// what that costs.
#[derive(Clone, Copy, Debug)]
pub struct LeastInterval<P>(
    /// The interval.
    pub Duration,
    /// The other policy.
    pub P,
);

impl<P: Policy> Policy for LeastInterval<P> {
    fn decide(&self, view: &View<'_>) -> Plan {
        self.1.decide(view)
    }

    fn defer(&self, view: &View<'_>) -> Duration {
        let left = view.since_version.map_or(Duration::ZERO, |since| self.0.saturating_sub(since));
        left.max(self.1.defer(view))
    }
}

/// Lets captures take at most this share of a sandbox's time, and else does what another policy says: after a capture
/// that took 200 ms and a share of 0.02 the next begins 10 s later. See [`Policy::defer`] for what that costs.
#[derive(Clone, Copy, Debug)]
pub struct ComputeBound<P>(
    /// The share, above 0 and up to 1. What is outside counts as the nearest.
    pub f64,
    /// The other policy.
    pub P,
);

/// The longest that [`ComputeBound`] lets a turn wait.
const LONGEST: Duration = Duration::from_secs(3600);

impl<P: Policy> Policy for ComputeBound<P> {
    fn decide(&self, view: &View<'_>) -> Plan {
        self.1.decide(view)
    }

    fn defer(&self, view: &View<'_>) -> Duration {
        let share = self.0.clamp(f64::MIN_POSITIVE, 1.0);
        let interval =
            Duration::try_from_secs_f64(view.last_cost.as_secs_f64() / share).unwrap_or(LONGEST).min(LONGEST);
        let left = view.since_version.map_or(Duration::ZERO, |since| interval.saturating_sub(since));
        left.max(self.1.defer(view))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crab_core::{
        Artifact, ArtifactId, Change, Effects, Evidence, HostFacts, Origin, SandboxId, Timings, Token, TurnNumber,
        Unknown, VersionId,
    };
    use proptest::prelude::*;

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            Just(Change::Unchanged),
            Just(Change::Changed(Evidence::TaskRan("x".into()))),
            Just(Change::Changed(Evidence::Crossing("x".into()))),
            Just(Change::Unknown(Unknown::NoBase)),
            Just(Change::Unknown(Unknown::Overflow("x".into()))),
            Just(Change::Unknown(Unknown::NotAttached)),
        ]
    }

    fn half() -> impl Strategy<Value = Half> {
        prop_oneof![
            Just(Half::Empty),
            Just(Half::Missing("x".into())),
            Just(Half::Stored(Artifact {
                id: ArtifactId::new("v1-0").unwrap(),
                sandbox: SandboxId::new("box").unwrap(),
                domain: Domain::Process,
                backend: "x".into(),
                bytes: None,
                size: None,
                depends_on: vec![],
                external: vec![],
                facts: Default::default(),
            })),
        ]
    }

    fn delta(filesystem: Change, process: Change) -> Delta {
        Delta { filesystem, process, effects: Effects::default(), token: Token(0) }
    }

    fn manifest(filesystem: Half, process: Half) -> Manifest {
        Manifest {
            format: 1,
            sandbox: SandboxId::new("box").unwrap(),
            version: VersionId(1),
            parent: None,
            turn: TurnNumber(1),
            origin: Origin::Turn,
            filesystem,
            process,
            conversation: None,
            effects: Effects::default(),
            created_ms: 0,
            host: HostFacts::default(),
            timings: Timings::default(),
        }
    }

    proptest! {
        #[test]
        fn what_is_not_proven_unchanged_is_captured(
            f in change(), p in change(), hf in half(), hp in half(), saves: bool, first: bool, n in 0..4u64, since in 0..9u64,
        ) {
            let delta = delta(f.clone(), p.clone());
            let manifest = manifest(hf.clone(), hp.clone());
            let mut view = View::new(&delta, (!first).then_some(&manifest), saves);
            view.since_full = since;
            let plan = sound(&view);
            prop_assert_eq!(plan.filesystem, first || f != Change::Unchanged || !matches!(hf, Half::Stored(_)));
            prop_assert_eq!(plan.process, saves && (first || p != Change::Unchanged || matches!(hp, Half::Missing(_))));
            // No policy goes below it, and none makes work out of nothing.
            let spaced = LeastInterval(Duration::from_secs(9), ComputeBound(0.5, FullEvery(n)));
            for asked in [ChangedOnly.decide(&view), FullEvery(n).decide(&view), spaced.decide(&view)] {
                prop_assert_eq!(asked.union(plan), asked);
                prop_assert_eq!(asked.is_skip(), plan.is_skip());
            }
        }
    }

    #[test]
    fn turns_wait_until_the_interval_is_over_or_the_last_capture_is_paid_off() {
        let delta = delta(Change::Unknown(Unknown::NoBase), Change::Unchanged);
        let seconds = Duration::from_secs_f64;
        let mut view = View::new(&delta, None, true);
        assert_eq!(LeastInterval(seconds(10.0), ChangedOnly).defer(&view), Duration::ZERO, "nothing was captured yet");
        view.since_version = Some(seconds(4.0));
        view.last_cost = seconds(0.2);
        assert_eq!(ChangedOnly.defer(&view), Duration::ZERO);
        assert_eq!(LeastInterval(seconds(10.0), ChangedOnly).defer(&view), seconds(6.0));
        assert_eq!(LeastInterval(seconds(3.0), ChangedOnly).defer(&view), Duration::ZERO);
        assert_eq!(ComputeBound(0.02, ChangedOnly).defer(&view), seconds(6.0));
        // Both: the longer one. A share of nothing, or of no number, is bounded all the same.
        assert_eq!(LeastInterval(seconds(5.0), ComputeBound(0.02, ChangedOnly)).defer(&view), seconds(6.0));
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(ComputeBound(odd, ChangedOnly).defer(&view) <= LONGEST);
        }
    }
}
