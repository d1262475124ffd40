//! Closed sets of words: enums whose values are typed, sent and stored as lower-case words.

/// Gives an enum `ALL`, `word`, `Display` and `FromStr` from one table. The text says what the words
/// are, for the message that refuses another one and lists them.
macro_rules! words {
    ($name:ident, $what:literal, { $($variant:ident = $word:literal),+ $(,)? }) => {
        impl $name {
            /// All of them, in the order of their declaration.
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$variant),+];

            /// The lower-case word that stands for it in text, on the wire and in stored documents.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.word())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::Error;
            fn from_str(text: &str) -> $crate::Result<Self> {
                Self::ALL.into_iter().find(|known| known.word() == text).ok_or_else(|| {
                    let known = Self::ALL.map(Self::word).join(", ");
                    $crate::Error::invalid(format!("{text:?} is no {}; there are {known}", $what))
                })
            }
        }
    };
}

pub(crate) use words;

#[cfg(test)]
mod tests {
    use crate::ErrorKind;
    use crate::manifest::LayerKind;
    use crate::reference::RefKind;
    use std::fmt::{Debug, Display};
    use std::str::FromStr;

    fn round_trip<T>(all: &[T])
    where
        T: Copy + Debug + Display + PartialEq + FromStr<Err = crate::Error>,
    {
        for known in all {
            assert_eq!(known.to_string().parse::<T>().unwrap(), *known);
        }
        let refused = "Other".parse::<T>().unwrap_err().to_string();
        assert!(all.iter().all(|known| refused.contains(&known.to_string())), "{refused}");
    }

    #[test]
    fn words_round_trip_and_others_are_refused_with_a_list() {
        round_trip(&ErrorKind::ALL);
        round_trip(&LayerKind::ALL);
        round_trip(&RefKind::ALL);
    }
}
