//! Engines that are wrong on purpose: test doubles, to show that the simulation would notice.
//!
//! Each replaces one step of the real engine. None exists outside of tests.

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// Nothing.
    None,
    /// Bits become durable before the data that they speak of.
    RecordsBeforeTheSync,
    /// What was read is kept whatever its digest.
    DoesNotVerify,
    /// Bits are set, and readers let go, before the bytes are written.
    SetsTheBitBeforeTheBytes,
    /// Readers of some pages of a chunk are let go before these are written.
    LetsGoBeforeThePages,
    /// Data is thrown away while its bits are set.
    PunchesBeforeTheBit,
    /// A chunk that rests is never woken.
    ForgetsTheResting,
    /// A takeover lets those go whose reads the dead fsd owed, before their bytes are there.
    LetsTheOwedGo,
}

impl Mutant {
    /// Every one that has to be found.
    pub const ALL: [Self; 7] = [
        Self::RecordsBeforeTheSync,
        Self::DoesNotVerify,
        Self::SetsTheBitBeforeTheBytes,
        Self::LetsGoBeforeThePages,
        Self::PunchesBeforeTheBit,
        Self::ForgetsTheResting,
        Self::LetsTheOwedGo,
    ];
}
